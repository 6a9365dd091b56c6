import struct

import pytest
import torch

from duotone.attention.cuda.group_layout import (
    TILE,
    GroupFormat,
    Operand,
    group_order,
    operand_of,
    to_group_records,
)
from duotone.attention.cuda.group_records import GroupLayout
from duotone.cache import BlockTable, pack_tensor
from duotone.quant import TensorSpec

KIVI = (TensorSpec(2, "tokens", 32), TensorSpec(2, "channels", 32))
INNER = (TensorSpec(2, "channels", 32), TensorSpec(2, "tokens", 32))
CASES = {
    "kivi": KIVI,
    "kivi1": tuple(spec.replace(bits=1) for spec in KIVI),
    "kivi4": tuple(spec.replace(bits=4) for spec in KIVI),
    "inner": INNER,
    "inner-hybrid": tuple(spec.replace(mapping="hybrid") for spec in INNER),
    "inner-symmetric": tuple(spec.replace(mapping="symmetric") for spec in INNER),
    "k-kivi-v-inner": (KIVI[0], INNER[1]),
    "wide-groups": (TensorSpec(2, "tokens", 64), TensorSpec(2, "channels", 64)),
    "mixed-bits": (TensorSpec(4, "channels", 32, "hybrid"), TensorSpec(1, "tokens", 64)),
}


def half(data: bytes, at: int) -> float:
    return struct.unpack_from("<e", data, at)[0]


def decode(data: bytes, form: Operand, rows: int, k: int) -> torch.Tensor:
    """A tile's operand as the kernel reads it, from the drawing in the layout's docstring."""
    chunks, per_half = k // 16, 16 // form.bits
    count = rows * k * form.bits // 32
    words = struct.unpack_from(f"<{count}I", data)
    per_lane = count // 32
    unit = 4 if per_lane % 4 == 0 else 1 if per_lane % 2 else 2
    at = 4 * count
    out = torch.zeros(rows, k)
    for row in range(rows):
        for column in range(k):
            tile, g, i_row = row // 16, row % 8, row // 8 % 2
            chunk, hi, t, side = column // 16, column // 8 % 2, column // 2 % 4, column % 2
            e = (tile * chunks + chunk) * 4 + i_row + 2 * hi
            w = e // per_half
            word = words[(w // unit) * 32 * unit + (g * 4 + t) * unit + w % unit]
            code = (word >> (16 * side + form.bits * (e % per_half))) & ((1 << form.bits) - 1)
            if not form.along_k:
                group = row // form.group
                place = at + ((group * chunks + chunk) * 4 + t) * 16 + 2 * (side + 2 * hi)
                scale, zero = half(data, place), half(data, place + 8)
                out[row, column] = code * scale + zero
                continue
            groups = -(-k // form.group)
            place = (tile * groups + column // form.group) * 8 + g
            if not form.signs:
                scale = half(data, at + place * 8 + 2 * i_row)
                out[row, column] = code * scale + half(data, at + place * 8 + 4 + 2 * i_row)
                continue
            (flags,) = struct.unpack_from("<H", data, at + place * 4 + 2 * i_row)
            (scale,) = struct.unpack("<e", struct.pack("<H", flags & 0x7FFF))
            slot = at + rows // 16 * groups * 32 + place * 8 + 4 * i_row
            (bits,) = struct.unpack_from("<I", data, slot)
            j = 8 * (chunk % 2) + 4 * hi + t
            if not flags >> 15:
                out[row, column] = code * scale + half(data, slot)
            else:
                negative = bits >> ((31 if side else 15) - j) & 1
                out[row, column] = -code * scale if negative else code * scale
    return out


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_a_tile_decodes_to_what_was_packed(name: str, head_dim: int) -> None:
    torch.manual_seed(0)
    tokens = 96 if "wide" not in name and "mixed" not in name else 128
    blocks = BlockTable(torch.tensor([[0, tokens]]))
    x = [torch.randn(1, 1, tokens, head_dim) + torch.randn(head_dim) for _ in range(2)]
    key, value = (pack_tensor(t, spec, blocks) for t, spec in zip(x, CASES[name], strict=True))
    form = GroupFormat(
        head_dim,
        operand_of(CASES[name][0], head_dim, "key"),
        operand_of(CASES[name][1], head_dim, "value"),
    )
    records = to_group_records(key, value, form)
    assert records.shape == (1, 1, -(-tokens // form.tokens), form.nbytes)
    expected = key.dequantize()[0, 0], value.dequantize()[0, 0]
    for tile in range(tokens // TILE):
        data = records[0, 0].flatten()[tile * form.tile_bytes :][: form.tile_bytes]
        raw = bytes(data.tolist())
        part = slice(tile * TILE, (tile + 1) * TILE)
        k_codes, v_codes = (TILE * head_dim * o.bits // 8 for o in (form.key, form.value))
        k_params = form.key.groups(TILE, head_dim) * (6 if form.key.signs else 4)
        params = raw[k_codes + v_codes :]
        keys = decode(raw[:k_codes] + params, form.key, TILE, head_dim)
        values = decode(
            raw[k_codes : k_codes + v_codes] + params[k_params:], form.value, head_dim, TILE
        )
        torch.testing.assert_close(keys, expected[0][part], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(values.T, expected[1][part], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(("rows", "k"), [(32, 64), (32, 96), (96, 32), (256, 32)])
def test_every_code_has_one_place(rows: int, k: int, bits: int) -> None:
    places = group_order(rows, k, bits, False)
    assert torch.equal(places.flatten().sort().values, torch.arange(rows * k))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec(8, "tokens", 32), "bits"),
        (TensorSpec(2, "tokens", 48), "groups of 32"),
        (TensorSpec(2, "tokens", 32, "symmetric"), "signs need"),
        (TensorSpec(2, "span", 32), "along one axis"),
        (TensorSpec(1, "tokens", 64, classes=((2, 1 / 2),)), "one width"),
    ],
    ids=str,
)
def test_what_the_kernel_lacks_has_a_reason(spec: TensorSpec, reason: str) -> None:
    assert reason in operand_of(spec, 64, "key")


def test_scales_beyond_the_kernels_arithmetic_are_not_laid_out() -> None:
    x = torch.randn(1, 1, 64, 64)
    for factor in (1, 1000):
        both = (pack_tensor(factor * x, spec, BlockTable(torch.tensor([[0, 64]]))) for spec in KIVI)
        assert (GroupLayout()(*both) is None) == (factor == 1000)
