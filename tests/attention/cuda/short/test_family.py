"""Segments that the kernels of short spans read, and reasons for those that they leave."""

from dataclasses import replace

import pytest
import torch

from duotone.attention.choice import Choice, choose
from duotone.attention.cuda.dense.family import DENSE
from duotone.attention.cuda.shared import runtime
from duotone.attention.cuda.short.family import MOST_TOKENS, SHORT
from duotone.quant import TensorSpec
from pretended_gpu import pretend

from cases import SMALL, Case, build

SPANS = Case((81 * 4, 90), *SMALL, spans=4, head_dim=64, dense=(9, 5), dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 with Triton."""
    pretend(monkeypatch)


def chosen(case: Case, **parts) -> Choice:
    query, (packed, *others) = build(case)
    return choose(query, [replace(packed, **parts), *others], case.tau)


def test_short_spans_and_tokens_beside_them_need_no_other_kernels() -> None:
    found = chosen(SPANS)
    assert (found.impl, found.others, found.reasons) == ("cuda", [], [])
    assert [family for family, _ in found.read] == [SHORT, DENSE]


@pytest.mark.parametrize("width", [TensorSpec(1), TensorSpec(4, param_dtype="float8")])
def test_codes_of_one_width_are_read(width: TensorSpec) -> None:
    assert chosen(replace(SPANS, key=width, value=width)).read[0][0] is SHORT


LEFT = {
    "longer spans": (replace(SPANS, lengths=(MOST_TOKENS + 1, 9), spans=1), "no records"),
    "a range of scores": (replace(SPANS, tau=(0.0, 1.0)), "calibration"),
    "a mask": (replace(SPANS, mask=True), "no mask"),
    "groups": (replace(SPANS, key=SMALL[0].replace(group=64)), "no records"),
    "3 bits": (replace(SPANS, key=TensorSpec(3)), "3"),
    "8 bits": (replace(SPANS, key=TensorSpec(8)), "8"),
    "many q heads": (replace(SPANS, gqa=20), "20 q heads"),
    "a wide V": (replace(SPANS, value_dim=128), "64 and 128"),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_has_a_reason(why: str) -> None:
    case, reason = LEFT[why]
    found = chosen(case)
    assert found.impl in ("triton", "reference")
    assert not any(family is SHORT for family, _ in found.read)
    assert any(reason in x for x in found.reasons)


def test_tensors_of_a_call_are_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (packed, _) = build(SPANS)
    codes = packed.key.codes.repeat_interleave(2, 3)[..., ::2]
    assert chosen(SPANS, key=replace(packed.key, codes=codes)).impl != "cuda"
    offsets = packed.value.blocks.offsets.T.contiguous().T
    blocks = type(packed.value.blocks)(offsets)
    strided = {x: replace(getattr(packed, x), blocks=blocks) for x in ("key", "value")}
    assert chosen(SPANS, **strided).impl != "cuda"
    wider = packed.value.codes.new_zeros(2, 1, 9, packed.value.codes.shape[3])
    codes = torch.cat([packed.value.codes, wider], 2)
    assert chosen(SPANS, value=replace(packed.value, codes=codes)).impl != "cuda"
    monkeypatch.setattr(runtime, "is_untried", lambda device: True)
    found = chosen(SPANS)
    assert found.impl == "triton"
    assert found.reasons == [runtime.UNTRIED]


def test_spans_of_k_and_v_may_differ() -> None:
    _, (packed, _) = build(SPANS)
    _, (other, _) = build(replace(SPANS, spans=5))
    assert chosen(SPANS, value=other.value).impl != "cuda"
    same = replace(packed.value, blocks=replace(packed.value.blocks))
    assert chosen(SPANS, value=same).impl == "cuda"
