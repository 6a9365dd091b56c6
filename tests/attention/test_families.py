"""A choice that a kernel family does not name is refused by it, whatever the choice is."""

from dataclasses import dataclass

import pytest
import torch

from duotone.attention import families
from duotone.attention.cuda.classes import pack as class_pack
from duotone.attention.cuda.classes.layout import spec_reason as class_reason
from duotone.attention.cuda.groups import pack as group_pack
from duotone.attention.cuda.groups.format import stream_reason
from duotone.attention.cuda.levels.search import level_reason
from duotone.attention.cuda.spans import pack as span_pack
from duotone.attention.cuda.spans.layout import spec_reason as span_reason
from duotone.attention.families import CLASSES, GROUPS, SPANS, TRITON
from duotone.cache.blocks import single_block
from duotone.cache.packed import pack_groups, pack_tensor
from duotone.quant import KVSpec, TensorSpec, quantize
from duotone.quant.honours import TORCH_PACKING, TORCH_READING, Honours, fields_of
from duotone.quant.spec_base import DECODED, STORED, decoded, stored

FAMILIES = [*(f for f in vars(families).values() if isinstance(f, Honours))]
FAMILIES += [TORCH_PACKING, TORCH_READING]


@dataclass(frozen=True)
class ToyDecoded(TensorSpec):
    """A spec with one more field that changes how codes are read."""

    toy: int = decoded(0)


@dataclass(frozen=True)
class ToyStored(TensorSpec):
    """A spec with one more field that changes what is stored."""

    toy: int = stored(0)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_refuses_a_new_field_by_itself(family: Honours) -> None:
    assert family.refusal(ToyDecoded()) is None
    assert family.refusal(ToyDecoded(toy=1)) == f"{family.name} have no choice of toy; got toy=1"
    refused = family.refusal(ToyStored(toy=1))
    assert (refused is not None) is family.packs


def plain(toy: int) -> KVSpec:
    return KVSpec(*[ToyDecoded(2, toy=toy)] * 2)


def grouped(toy: int) -> KVSpec:
    key = ToyDecoded(2, group=32, toy=toy)
    return KVSpec(key, ToyDecoded(2, along="channels", group=32, toy=toy))


def classed(toy: int) -> KVSpec:
    classes = ((4, 1 / 8), (2, 1 / 4))
    return KVSpec(ToyDecoded(group=64, classes=classes, toy=toy), ToyDecoded(toy=toy))


def levels_reason(key: TensorSpec, value: TensorSpec) -> str | None:
    x = torch.zeros(1, 1, 64, 16)
    return level_reason(x, key, single_block(torch.tensor([64])))


DOORS = {
    "spans": (plain, span_reason),
    "groups": (grouped, stream_reason),
    "classes": (classed, class_reason),
    "packing spans": (plain, lambda key, value: span_pack.pack_reason(KVSpec(key, value))),
    "packing groups": (grouped, lambda key, value: group_pack.pack_reason(KVSpec(key, value))),
    "packing classes": (classed, lambda key, value: class_pack.pack_reason(KVSpec(key, value))),
}


@pytest.mark.parametrize("name", DOORS)
def test_the_doors_of_kernels_ask_their_family(name: str) -> None:
    spec, door = DOORS[name]
    assert door(spec(0).key, spec(0).value) is None
    assert "toy=1" in door(spec(1).key, spec(1).value)


def test_levels_are_not_searched_for_a_new_field() -> None:
    assert "toy=1" in levels_reason(ToyDecoded(toy=1), TensorSpec())


def test_torch_refuses_to_pack_a_new_field() -> None:
    x, spec = torch.randn(1, 1, 8, 4), ToyDecoded(toy=1)
    for pack in (
        lambda: quantize(x, spec),
        lambda: pack_tensor(x, spec, single_block(torch.tensor([8]))),
        lambda: pack_groups(x, spec),
    ):
        with pytest.raises(ValueError, match=r"no choice of toy; got toy=1\. Leave"):
            pack()


def test_widths_are_those_of_the_family() -> None:
    eight = ((8, 1 / 8),)
    assert "[1, 2, 4] bits; got 8" in GROUPS.refusal(TensorSpec(8, group=32))
    assert "[1, 2, 4] bits; got 8" in CLASSES.refusal(TensorSpec(classes=eight))
    assert SPANS.refusal(TensorSpec(8)) is None
    assert all(
        "got 3" in family.refusal(TensorSpec(3)) for family in (SPANS, CLASSES, GROUPS, TRITON)
    )


def test_a_family_honours_fields_that_exist() -> None:
    assert fields_of(TensorSpec, DECODED, STORED) == TORCH_PACKING.honours
    assert fields_of(TensorSpec, DECODED) == TORCH_READING.honours
    with pytest.raises(ValueError, match=r"fields of TensorSpec; got \['colour'\]"):
        Honours.of("kernels", {"colour"})
