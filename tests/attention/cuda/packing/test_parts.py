"""Host code of packing pictures in two parts, without a GPU: nothing is launched."""

from contextlib import nullcontext

import pytest
import torch
from no_questions import NoQuestions
from parts_cases import LAYERS, PROMPTS, SPECS, Prompt

from duotone.attention.cuda.classes import pack as class_pack
from duotone.attention.cuda.classes import small_levels
from duotone.attention.cuda.levels import search as level_search
from duotone.attention.cuda.levels.search import find_levels
from duotone.attention.cuda.spans import pack as span_pack
from duotone.attention.cuda.spans.layout import RecordFormat
from duotone.quant.checks import NOT_FINITE, is_finite

# Operations of torch in a layer that make no view: room for results counts, launches do not.
MOST = {"parts": 54, "first layer": 54, "basis": 64, "spans": 26}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels that would have been launched, by the host code of CUDA tensors."""
    names = []

    def kernel(source, name, macros, device):
        return lambda at, given: names.append(name)

    def sorted_levels(x, spec, spans, coded):
        levels = find_levels(x, spec, spans)
        assert is_finite(levels.total, NOT_FINITE)
        return levels

    def packed_spans(self, key, value, spec, piece):
        form = RecordFormat(key.shape[3], spec.key.bits, spec.value.bits)
        return span_pack.span_pack(key, value, spec, piece, form)

    for module in (class_pack, small_levels, level_search, span_pack):
        monkeypatch.setattr(module, "kernel", kernel)
    for module in (level_search, span_pack):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(span_pack, "held", lambda *_: None)
    monkeypatch.setattr(span_pack, "counters", lambda device, count: (0, None))
    monkeypatch.setattr(class_pack, "sorted_levels", sorted_levels)
    monkeypatch.setattr(class_pack, "stored_levels", small_levels.small_rows)
    monkeypatch.setattr(
        class_pack.ClassLayout, "pack", lambda self, *given: class_pack.class_pack(*given)
    )
    monkeypatch.setattr(span_pack.SpanLayout, "pack", packed_spans)
    return names


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("policy", SPECS)
def test_layers_after_the_second_ask_the_host_nothing(policy: str, name: str, launches) -> None:
    """The first layer, and the first one without a rule of its own, find what all layers share."""
    prompt = Prompt(SPECS[policy], name)
    prompt.apply(range(2))
    before = len(launches)
    with NoQuestions() as layers:
        prompt.apply(range(2, LAYERS))
    assert len(launches) >= before + 4 * (LAYERS - 2)
    assert all(store.background.records is not None for store in prompt.stores)
    assert layers.computed <= MOST[policy] * (LAYERS - 2)
