"""A choice that a kernel family does not name is refused by it, whatever the choice is."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from duotone.attention.cuda.classes import pack as class_pack
from duotone.attention.cuda.classes.family import CLASSES
from duotone.attention.cuda.groups import pack as group_pack
from duotone.attention.cuda.groups.family import GROUPS
from duotone.attention.cuda.levels import search
from duotone.attention.cuda.spans import pack as span_pack
from duotone.attention.cuda.spans import searched
from duotone.attention.cuda.spans.family import SPANS
from duotone.attention.families import FAMILIES
from duotone.attention.family import Family, Tokens
from duotone.attention.refused import reason_against
from duotone.attention.triton.family import TRITON
from duotone.cache.blocks import single_block
from duotone.cache.packing import pack_groups, pack_tensor
from duotone.quant import KVSpec, TensorSpec, quantize
from duotone.quant.honours import Honours
from toy_specs import DecodedTensor, StoredTensor

HONOURS = [
    *(f.honours for f in FAMILIES),
    *(f.packs for f in FAMILIES if f.packs),
    search.HONOURS,
    searched.HONOURS,
]


@pytest.mark.parametrize("family", HONOURS, ids=lambda family: family.name)
def test_every_family_refuses_a_new_field_by_itself(family: Honours) -> None:
    assert family.refusal(DecodedTensor()) is None
    assert family.refusal(DecodedTensor(toy=1)) == f"{family.name} have no choice of toy; got toy=1"
    refused = family.refusal(StoredTensor(toy=1))
    assert (refused is not None) is family.packs


def plain(toy: int) -> KVSpec:
    return KVSpec(*[DecodedTensor(2, toy=toy)] * 2)


def grouped(toy: int) -> KVSpec:
    key = DecodedTensor(2, group=32, toy=toy)
    return KVSpec(key, DecodedTensor(2, along="channels", group=32, toy=toy))


def classed(toy: int) -> KVSpec:
    classes = ((4, 1 / 8), (2, 1 / 4))
    return KVSpec(DecodedTensor(group=64, classes=classes, toy=toy), DecodedTensor(toy=toy))


def reads(family: Family, kv: KVSpec) -> str | None:
    """As for a layer of 64 channels and 4 q heads per kv head."""
    return family.refusal(Tokens(kv.key, kv.value, (64, 64), 4, torch.bfloat16, 227 << 10))


STATES, BLOCK = torch.zeros(1, 1, 64, 16), single_block(torch.tensor([64]))
DOORS = {
    "spans": (plain, lambda kv: reads(SPANS, kv)),
    "groups": (grouped, lambda kv: reads(GROUPS, kv)),
    "classes": (classed, lambda kv: reads(CLASSES, kv)),
    "triton": (plain, lambda kv: reads(TRITON, kv)),
    "packing spans": (plain, partial(reason_against, span_pack.check)),
    "packing spans by levels": (plain, partial(reason_against, searched.check)),
    "packing groups": (grouped, partial(reason_against, group_pack.check)),
    "packing classes": (classed, partial(reason_against, class_pack.check)),
    "levels": (plain, lambda kv: reason_against(search.check, STATES, kv.key, BLOCK)),
}


@pytest.mark.parametrize("name", DOORS)
def test_the_doors_of_kernels_ask_their_family(name: str) -> None:
    spec, door = DOORS[name]
    assert door(spec(0)) is None
    assert "toy=1" in door(spec(1))


@pytest.mark.parametrize("of", [plain, grouped, classed])
def test_one_family_takes_tokens_of_each_kind(of: Callable) -> None:
    tokens = Tokens(of(0).key, of(0).value, (64, 64), 4, torch.bfloat16, 227 << 10)
    for kind in ("visual", "background", "text"):
        takers = [f for f in FAMILIES if f.impl == "cuda" and kind in f.kinds and f.takes(tokens)]
        assert len(takers) == 1


def test_torch_refuses_to_pack_a_new_field() -> None:
    x, spec = torch.randn(1, 1, 8, 4), DecodedTensor(toy=1)
    for pack in (
        lambda: quantize(x, spec),
        lambda: pack_tensor(x, spec, single_block(torch.tensor([8]))),
        lambda: pack_groups(x, spec),
    ):
        with pytest.raises(ValueError, match=r"no choice of toy; got toy=1\. Leave"):
            pack()


def test_widths_are_those_of_the_family() -> None:
    eight = ((8, 1 / 8),)
    assert "[1, 2, 4] bits; got 8" in GROUPS.honours.refusal(TensorSpec(8, group=32))
    assert "[1, 2, 4] bits; got 8" in CLASSES.honours.refusal(TensorSpec(classes=eight))
    assert not any(SPANS.honours.refusal(TensorSpec(bits)) for bits in (3, 8))
    assert all(
        "got 3" in family.honours.refusal(TensorSpec(3)) for family in (CLASSES, GROUPS, TRITON)
    )


@pytest.mark.parametrize(
    "family", [GROUPS.honours, GROUPS.packs, SPANS.packs], ids=lambda x: x.name
)
def test_some_kernels_refuse_parameters_of_8_bits(family: Honours) -> None:
    assert "param_dtype='float8'" in family.refusal(TensorSpec(2, param_dtype="float8"))


def test_other_kernels_take_parameters_of_8_and_16_bits() -> None:
    spec = TensorSpec(2)
    for honours in (CLASSES.honours, CLASSES.packs, search.HONOURS, searched.HONOURS):
        assert honours.refusal(spec.replace(param_dtype="float8")) is None
        assert "float32" in honours.refusal(spec.replace(param_dtype="float32"))


def test_a_family_honours_fields_that_exist() -> None:
    with pytest.raises(ValueError, match=r"fields of TensorSpec; got \['colour'\]"):
        Honours.of("kernels", {"colour"})
