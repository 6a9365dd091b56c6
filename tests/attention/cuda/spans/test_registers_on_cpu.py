"""Operands that `spans/decode.cu` makes of records, on a CPU: the codes that the layout draws."""

import ctypes

import pytest
import torch

from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import RecordFormat, to_records
from duotone.cache import BlockTable

from cuda_on_cpu import missing
from units_on_cpu import compiled

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
LANE, BYTE = torch.arange(32)[:, None, None], torch.arange(4)
G, T = LANE // 4, LANE % 4
# A lane's registers of K and of V, every code moved down to the lowest bits of its byte.
KERNEL = """
#include "spans/shapes.cuh"
void registers(const Arguments& at) {
  const u32* tile = (const u32*)at.packed_tiles;
  const auto load = [&](u32* words, int n) {
    const int unit = n % 4 == 0 ? 4 : n % 2 ? 1 : 2;
    for (int w = 0; w < n; w++)
      words[w] = tile[(w / unit * 32 + threadIdx.x) * unit + w % unit];
    tile += 32 * n;
  };
  u32 k[KWORDS], v[VWORDS];
  load(k, KWORDS), load(v, VWORDS);
  u32* out = (u32*)at.partial + threadIdx.x * 16 * MT;
  const u32 mask = V_RAW ? ((1 << VB) - 1) * 0x01010101u : FULL;
  [&]<int... E>(std::integer_sequence<int, E...>) {
    ((*out++ = k_register<E>(k) >> K_BIT(E % KREGS)), ...);
    ((*out++ = v_register<E>(v) / (u32)(1 / channel_weight(E / MT % 2, E % MT)) & mask), ...);
  }(std::make_integer_sequence<int, 8 * MT>());
}
"""


def registers(form: RecordFormat, data: torch.Tensor, folder) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the registers of K and of V, [lanes, registers, 4]."""
    out = torch.zeros(32, form.channels, dtype=torch.int32)
    given = span_decode.Arguments(packed_tiles=data.data_ptr(), partial=out.data_ptr())
    macros = span_decode.macros_of(form, False) | {
        "CHANNELS": form.head_dim, "G": 4, "WARPS": 1, "SUB_BLOCKS": 1, "STAGES": 3, "PAGED": 0,
        "QUERY": 2, "OUT": 2, "OVERLAP": 0, "MERGE": 0, "LATE": 0, "__CUDA_ARCH__": 900,
        "ARGUMENTS_BYTES": ctypes.sizeof(given),
    }  # fmt: skip
    compiled("registers", macros, folder, KERNEL)(given, 1, 32)
    return out.view(torch.uint8).unflatten(1, (2, -1, 4)).unbind(1)


@pytest.mark.parametrize("head_dim", [64, 100, 128])
@pytest.mark.parametrize("bits", [(3, 3), (3, 4), (2, 3), (1, 1), (4, 2), (8, 8)], ids=str)
def test_operands_are_the_codes_that_the_picture_says(bits, head_dim, folder) -> None:
    torch.manual_seed(0)
    form = RecordFormat(head_dim, *bits)
    key, value = (torch.randint(0, 1 << b, (1, 1, 64, head_dim), dtype=torch.uint8) for b in bits)
    records = to_records(key, value, BlockTable(torch.tensor([[0, 64]])), form)
    # One tile: of few bits the first of several, which lie one after the other.
    k_bytes = form.tiles * 64 * form.channels * form.key_bits // 8
    own = records.data[0, 0, 0].split([k_bytes, form.nbytes - k_bytes])
    data = torch.cat([part[: len(part) // form.tiles] for part in own])
    k, v = registers(form, data, folder)
    e, columns = torch.arange(8 * form.channels // 16)[:, None], form.channels // 16
    fill = (0, form.channels - head_dim)
    key, value = (torch.nn.functional.pad(x[0, 0], fill) for x in (key, value))
    row, r = e // columns, e % columns
    assert torch.equal(k, key[8 * row + G, 16 * r + 4 * T + BYTE])
    token = 32 * (row // 4) + 8 * (row // 2 % 2) + 2 * T + 16 * (BYTE % 2) + BYTE // 2
    assert torch.equal(v, value[token, 16 * r + 8 * (row % 2) + G])
