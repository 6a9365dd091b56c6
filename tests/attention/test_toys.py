"""A family of kernels that is new is one object in front of the others: all doors ask it."""

from dataclasses import dataclass, replace

import pytest
import torch
from launch_cases import LENGTHS, records_of

import duotone
from duotone.attention import Shape, choice, decode_attention, plan, resolve
from duotone.attention.cuda.spans.family import SPANS
from duotone.attention.cuda.spans.layout import Records
from duotone.attention.cuda.spans.stored import SpanLayout
from duotone.attention.family import Family, Tokens
from duotone.attention.refused import RefusedError
from duotone.cache.packed import PackedTensor
from pretended_gpu import pretend

from cases import Case

EVEN = "toys read odd numbers of q heads per kv head; got {}"
SHAPE = Shape(64, 6, 2, torch.bfloat16)


@dataclass(frozen=True)
class ToyRecords(Records):
    """Records of the toy family."""


class ToyLayout(SpanLayout):
    """Spans' order, by another name."""

    def __call__(self, key: PackedTensor, value: PackedTensor) -> ToyRecords:
        return ToyRecords(**vars(super().__call__(key, value)))


LAYOUT = ToyLayout()


def _rule(tokens: Tokens) -> None:
    if tokens.group % 2 == 0:
        raise RefusedError(EVEN.format(tokens.group))


TOYS: Family = replace(
    SPANS,
    name="toys",
    takes=lambda tokens: True,
    holds=lambda segment: isinstance(segment.records, ToyRecords),
    rule=_rule,
    at_call=None,
    layout=LAYOUT,
)


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan, choice):
        monkeypatch.setattr(module, "FAMILIES", (TOYS, *module.FAMILIES))


def test_a_new_family_reads_what_it_takes_and_says_why_it_refuses_the_rest() -> None:
    spec = duotone.scheme("minmax", bits=2)
    found = resolve(spec, SHAPE)
    assert (found.readers["visual"], found.reasons["visual"]) == (TOYS, None)
    assert found.layouts.visual is LAYOUT
    found = resolve(spec, SHAPE._replace(q_heads=4))
    assert found.reasons["visual"] == EVEN.format(2)
    assert found.readers["visual"].impl == "triton"


def test_its_segments_are_launched_by_it(caught, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    seen = []

    def task(*given):
        seen.append(given[1].records)
        return SPANS.task(*given)

    known = (replace(TOYS, task=task), *choice.FAMILIES[1:])
    monkeypatch.setattr(choice, "FAMILIES", known)
    query, kv = records_of(Case(LENGTHS, gqa=3, head_dim=128, dtype=torch.bfloat16), LAYOUT)
    decode_attention(query, kv, sm_scale=0.1, impl="cuda")
    assert seen == [kv[0].records]
    assert [one.source for one in caught] == ["spans/decode.cu"]
    query, kv = records_of(Case(LENGTHS, gqa=2, head_dim=128, dtype=torch.bfloat16), LAYOUT)
    with pytest.raises(ValueError, match="toys read odd numbers"):
        decode_attention(query, kv, sm_scale=0.1, impl="cuda")
