"""Every field of a spec has a role, and a new one is refused before any work is done."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.attention import attend
from duotone.cache.blocks import single_block
from duotone.cache.packed import pack_tensor
from duotone.cache.segments import PackedSegment
from duotone.quant import quantize
from duotone.quant.honours import CACHES, check_honoured, choices, fields_of
from duotone.quant.spec_base import DECODED, POLICY, ROLE, STORED, decoded, of_policy, stored


@dataclass(frozen=True)
class ToyTensor(TensorSpec):
    """A tensor's spec with one more field that changes how codes are read."""

    toy: int = decoded(0)


@dataclass(frozen=True)
class ToyStored(TensorSpec):
    """A tensor's spec with one more field that changes what is stored."""

    toy: int = stored(0)


@dataclass(frozen=True)
class ToyPair(KVSpec):
    """A pair's spec with one more field that changes how codes are read."""

    toy: int = decoded(0)


@dataclass(frozen=True)
class ToyCache(CacheSpec):
    """A cache's spec with one more decoded field."""

    toy: int = decoded(0)


@dataclass(frozen=True)
class Undeclared(CacheSpec):
    """A cache's spec with one more field that declares no role."""

    toy: int = 0


@dataclass(frozen=True)
class MorePolicy(CacheSpec):
    """A cache's spec with one more field that chooses tokens."""

    toy: int = of_policy(0)


STREAM = duotone.scheme("kivi", bits=2)
TOY_GROUPS = ToyTensor(2, group=32, toy=1)
TOYS = {
    "tensor": CacheSpec(visual=KVSpec(ToyTensor(toy=1))),
    "stored": CacheSpec(visual=KVSpec(ToyStored(toy=1))),
    "rule": STREAM.replace(
        layers=(duotone.LayerRule(0, 1, text=STREAM.text.replace(key=TOY_GROUPS)),)
    ),
    "pair": CacheSpec(visual=ToyPair(toy=1)),
    "cache": ToyCache(toy=1),
    "no role": Undeclared(toy=1),
}


@pytest.mark.parametrize("kind", [TensorSpec, KVSpec, CacheSpec])
def test_every_field_has_a_role(kind: type) -> None:
    assert {field.metadata[ROLE] for field in fields(kind)} <= {STORED, DECODED, POLICY}


def test_caches_honour_the_fields_that_they_have() -> None:
    assert fields_of(CacheSpec, STORED, DECODED) == CACHES
    assert not fields_of(KVSpec, STORED, DECODED)


def test_choices_are_told_by_role() -> None:
    assert choices(TensorSpec(2, eta=0.1), DECODED) == {"bits": 2}
    assert choices(TensorSpec(2, eta=0.1), STORED) == {"eta": 0.1}
    assert choices(CacheSpec(tau=(0.0, 1.0), sink=3), DECODED) == {"tau": (0.0, 1.0)}


@pytest.mark.parametrize("name", TOYS)
def test_a_new_choice_is_refused_by_itself(name: str) -> None:
    with pytest.raises(ValueError, match=r"have no choice of toy; got toy=1\. Leave the field"):
        check_honoured(TOYS[name])


def test_a_new_policy_and_a_default_pass() -> None:
    check_honoured(MorePolicy(toy=1))
    check_honoured(CacheSpec(visual=ToyPair(ToyTensor(), ToyStored())))
    check_honoured(ToyCache())


def test_torch_reads_no_new_choice() -> None:
    x = torch.randn(1, 1, 128, 16)
    table = single_block(torch.tensor([128]))
    key, value = (pack_tensor(x, TensorSpec(2), table) for _ in range(2))
    toy = ToyTensor(2, toy=1)
    query, lengths = torch.randn(1, 1, 1, 16), torch.tensor([128])
    newer = {"key": replace(key, spec=toy), "value": replace(value, spec=toy)}

    def attention(**given: object) -> Callable:
        segment = PackedSegment(**{"key": key, "value": value, **given}, lengths=lengths)
        return lambda: attend(query, [segment], sm_scale=1.0)

    readers = [
        replace(quantize(x, TensorSpec(2)), spec=toy).dequantize,
        newer["key"].dequantize,
        *(attention(**{name: newer[name]}) for name in newer),
    ]
    for read in readers:
        with pytest.raises(ValueError, match="operations that read have no choice of toy"):
            read()
