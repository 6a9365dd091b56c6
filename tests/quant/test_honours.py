"""Every field of a spec has a role, and a new one is not read."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.attention import attend
from duotone.cache.blocks import single_block
from duotone.cache.packing import pack_tensor
from duotone.cache.segments import PackedSegment
from duotone.quant import quantize
from duotone.quant.honours import Honours, choices
from duotone.quant.spec_base import DECODED, POLICY, ROLE, STORED
from toy_specs import DecodedTensor


@pytest.mark.parametrize("kind", [TensorSpec, KVSpec, CacheSpec])
def test_every_field_has_a_role(kind: type) -> None:
    assert {field.metadata[ROLE] for field in fields(kind)} <= {STORED, DECODED, POLICY}


def test_choices_are_told_by_role() -> None:
    assert choices(TensorSpec(2, eta=0.1), DECODED) == {"bits": 2}
    assert choices(TensorSpec(2, eta=0.1), STORED) == {"eta": 0.1}
    assert choices(CacheSpec(tau=(0.0, 1.0), sink=3), DECODED) == {"tau": (0.0, 1.0)}


def test_types_of_parameters_are_honoured_one_by_one() -> None:
    some = Honours.of("toys", {"bits", "param_dtype"}, params=("float16", "float8"))
    assert some.refusal(TensorSpec(2, param_dtype="float8")) is None
    assert "got param_dtype='bfloat16'" in some.refusal(TensorSpec(2, param_dtype="bfloat16"))
    none = Honours.of("toys", {"bits"})
    assert "no choice of param_dtype" in none.refusal(TensorSpec(2, param_dtype="float8"))


def test_torch_reads_no_new_choice() -> None:
    x = torch.randn(1, 1, 128, 16)
    table = single_block(torch.tensor([128]))
    key, value = (pack_tensor(x, TensorSpec(2), table) for _ in range(2))
    toy = DecodedTensor(2, toy=1)
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
