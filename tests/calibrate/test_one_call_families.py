"""`duotone.calibrated` on tiny models of all tested families, and answers in its spec."""

import zlib

import pytest
import torch

import duotone
from duotone.calibrate import one_call
from duotone.calibrate.written import Written

from families import FAMILIES, HYBRIDS, inputs, new_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated"),
    pytest.mark.filterwarnings("ignore::duotone.SlowPathWarning"),
]
EVERY = FAMILIES | HYBRIDS
PICTURED = [name for name, family in EVERY.items() if family.is_multimodal]
TEXTS = [name for name in EVERY if name not in PICTURED]
NEW = 130  # tokens of an answer, after which text is packed


class AnyTurns:
    """A processor of a family's pictures, with as many random tokens as a turn has words."""

    def __init__(self, name):
        self.name = name

    def apply_chat_template(self, conversations, **_):
        parts = [p for turns in conversations for turn in turns for p in turn["content"]]
        seed = zlib.crc32(" ".join(p.get("text", "") for p in parts).encode())
        prompts = [
            [self._part(p) for turn in turns for p in turn["content"]] for turns in conversations
        ]
        return inputs(self.name, prompts, seed)

    def _part(self, part):
        return "image" if part["type"] == "image" else max(1, len(part["text"].split()))

    def batch_decode(self, rows, *, skip_special_tokens):
        return [" ".join(map(str, row)) for row in rows]


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    """Fewer and shorter samples than a call takes."""
    monkeypatch.setattr(one_call, "usual_samples", lambda tasks: 2)
    monkeypatch.setattr("duotone.calibrate.text.usual_samples", lambda tasks: 2)
    monkeypatch.setattr(one_call, "heldout_of", lambda asked, tasks: 2)
    monkeypatch.setattr(one_call, "Written", lambda: Written(NEW))


def calibrated_and_answered(name, processor, prompts, folder):
    """(spec, memory of a cache after answers) of a family."""
    torch.manual_seed(0)
    model = new_model(name)
    spec = duotone.calibrated(model, processor, folder=folder, progress=lambda *_: None)
    again = duotone.calibrated(model, processor, folder=folder, progress=lambda *_: None)
    assert again == spec
    with duotone.enable(model, spec) as session:
        model.generate(
            **inputs(name, prompts, 3), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
        )
    return spec, session.memory()


@pytest.mark.parametrize("name", PICTURED)
def test_families_with_pictures(name, tmp_path):
    prompts = [[9, "image", 30], [4, "image", 8]]
    spec, memory = calibrated_and_answered(name, AnyTurns(name), prompts, tmp_path)
    assert spec.at_layer(0).visual != "text"
    assert memory.bits_per_element < 32


@pytest.mark.parametrize("name", TEXTS)
def test_families_of_text(name, tmp_path):
    spec, memory = calibrated_and_answered(name, None, [[40], [17]], tmp_path)
    assert spec.visual == "text"
    assert memory.bits_per_element < 32
