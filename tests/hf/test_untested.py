"""Types that "work untested" answer as with their own cache, from their shrunk default configs.

Of a few types pictures are ids without pixels: their tokens are quantized as visual ones.
"""

import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from replay_double import ReplayDouble, double
from shrunk import tiny_model_of
from shrunk_pictures import ALWAYS, PIXELS, with_picture
from torch import Tensor
from transformers import PreTrainedModel

import duotone
from benchmarks.supports.table import FILE
from benchmarks.supports.tables import group
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.tools.slow_paths import SlowPathWarning
from held import reachable

from families import IMAGE, LOGIT_TOLERANCE, logit_error
from paths import REPOSITORY

__all__ = ["double"]  # a fixture

PAGE = json.loads((REPOSITORY / FILE).read_text(encoding="utf-8"))
UNTESTED = [row["model_type"] for row in PAGE["rows"] if group(row) == "works untested"]
pytestmark = [
    pytest.mark.skipif(
        PAGE["versions"]["transformers"] != transformers.__version__,
        reason="the page is of another transformers",
    ),
    pytest.mark.filterwarnings("ignore:a step of a latent cache"),
]
EIGHT = TensorSpec(8)
STREAM = KVSpec(TensorSpec(8, group=4), TensorSpec(8, along="channels", group=8))
MIXED = CacheSpec(visual=KVSpec(EIGHT, EIGHT), text=STREAM, ranges="run", sink=2, recent=3)
DENSE = CacheSpec(visual="dense", text="dense")
PICTURE, NEW = 4, 6
# They count positions by themselves, or ask the device for a number.
STEP_BY_STEP = ("exaone4_5", "hyperclovax_vision_v2", "step3p7", "evolla", *ALWAYS)
STEP_BY_STEP += tuple(row["model_type"] for row in PAGE["rows"] if row.get("graphs"))

# Steps write a number of the host, which only a second capture has on the device.
CAPTURED_LATER = ("muse_glimmer", "muse_spark")


def prompts(model: PreTrainedModel, tokens: int) -> dict[str, Tensor]:
    """Two rows with a picture of ids alone where a model allows it, one padded on the left."""
    if model.config.model_type in ALWAYS:
        return with_picture(model, tokens - 25)
    ids = torch.randint(2, 280, (2, tokens))
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    ids[:, 20 : 20 + PICTURE] = IMAGE
    return {"input_ids": ids * mask, "attention_mask": mask}


def answers(model: PreTrainedModel, given: dict[str, Tensor]) -> Any:
    call = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(**given, **call, output_logits=True)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", UNTESTED)
def test_exact_codes_answer_as_its_own_cache(name: str) -> None:
    model = tiny_model_of(name)
    given = prompts(model, 40)
    theirs = answers(model, given)
    with duotone.enable(model, MIXED) as session:
        ours = answers(model, given)
    tokens = int((given["input_ids"] == IMAGE).sum(1)[0]) * session.cache.facts.is_multimodal
    assert session.cache.ledger.state.visual.lengths.tolist() == [tokens] * 2
    assert torch.equal(ours.sequences, theirs.sequences)
    assert logit_error(torch.stack(ours.logits), torch.stack(theirs.logits)) < LOGIT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTESTED)
def test_two_bits_take_fewer_bytes_than_its_own_cache(name: str) -> None:
    model = tiny_model_of(name)
    given = prompts(model, 300)
    theirs = answers(model, given)
    with duotone.enable(model, duotone.scheme("kivi", bits=2)) as session:
        ours = answers(model, given)
    # Some rule tokens out with -inf, in both.
    assert torch.equal(torch.stack(ours.logits).isfinite(), torch.stack(theirs.logits).isfinite())
    own = sum(tensor.nbytes for tensor in reachable(theirs.past_key_values).values())
    assert session.memory().total_bytes < own


@pytest.mark.slow
@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", [name for name in UNTESTED if name in PIXELS])
def test_exact_codes_answer_alike_about_a_picture(name: str) -> None:
    model = tiny_model_of(name)
    given = with_picture(model)
    theirs = answers(model, given)
    with duotone.enable(model, MIXED) as session:
        ours = answers(model, given)
    tokens = int((given["input_ids"] == IMAGE).sum(1)[0]) * session.cache.facts.is_multimodal
    assert session.cache.ledger.state.visual.lengths.tolist() == [tokens] * 2
    assert torch.equal(ours.sequences, theirs.sequences)
    assert logit_error(torch.stack(ours.logits), torch.stack(theirs.logits)) < LOGIT_TOLERANCE
    other = {**given, **PIXELS[name](2)}
    assert not torch.equal(answers(model, other).logits[0], theirs.logits[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTESTED)
def test_replayed_steps_answer_alike_or_are_refused(double: type[ReplayDouble], name: str) -> None:
    model = tiny_model_of(name)
    is_asked = name in PIXELS
    given = with_picture(model) if is_asked else prompts(model, 40)
    theirs = answers(model, given)
    refused = pytest.warns(SlowPathWarning, match="is launched step by step")
    with refused if name in STEP_BY_STEP else nullcontext(), duotone.enable(model, DENSE):
        ours = answers(model, given)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert logit_error(torch.stack(ours.logits), torch.stack(theirs.logits)) < LOGIT_TOLERANCE
    captured = NEW - 2 - (name in CAPTURED_LATER)
    assert double.replays == (0 if name in STEP_BY_STEP else captured)
