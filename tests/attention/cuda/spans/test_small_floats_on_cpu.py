"""Parameters of 8 bits of spans as lanes read them: the kernel's own source on a CPU."""

import ctypes

import pytest
import torch

from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import format_of, span_layout
from duotone.attention.refused import RefusedError
from duotone.cache import BlockTable, pack_tensor
from duotone.quant import TensorSpec

from cuda_on_cpu import missing
from units_on_cpu import compiled

HEAD_DIM, TOKENS, WARPS = 80, 111, 2
SPEC = TensorSpec(2, param_dtype="float8")
# Of each span: K's scales and zero-points of the first warp's lanes, V's of every channel.
KERNEL = """
#include "spans/shapes.cuh"
#include "spans/prologue.cuh"
void read_parameters(const Arguments& at) {
  __shared__ Prologue prologue;
  Unit u;
  find_unit(at, u);
  Params params;
  params.load(at, u);
  params.store_value(u, prologue);
  __syncthreads();
  float (*out)[CHANNELS] = (float (*)[CHANNELS])at.partial + 4 * u.row;
  for (int i = 0; i < FOURS && !u.warp; i++) {
    const int c = channels_of(u, i);
    const float4 scale = params.k_scale[i].floats();
    const float4 zero = lowest_levels<KB>(params.k_zero[i].floats(), scale);
    if (c < CHANNELS) memcpy(out[0] + c, &scale, 16), memcpy(out[1] + c, &zero, 16);
  }
  for (int c = u.tid; c < CHANNELS; c += WARPS * 32)
    out[2][c] = prologue.v_scale[c], out[3][c] = prologue.v_zero[c];
}
"""


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("kind", ["float8", "float16"])
def test_lanes_read_what_torch_reads(kind: str, tmp_path) -> None:
    torch.manual_seed(0)
    spans, spec = (
        BlockTable(torch.tensor([[0, TOKENS, 2 * TOKENS]])),
        SPEC.replace(param_dtype=kind),
    )
    x = torch.randn(2, 1, 1, 2 * TOKENS, HEAD_DIM) * torch.logspace(-5, 2, HEAD_DIM, 2)
    x = x + torch.randn(HEAD_DIM) * torch.logspace(1, -4, HEAD_DIM, 3)
    key, value = (pack_tensor(t, spec, spans) for t in x)
    records = span_layout(key, value)
    assert records.format.small is (kind == "float8")
    out, query = torch.full((2, 4, HEAD_DIM), torch.nan), torch.zeros(1, 1, HEAD_DIM)
    given = span_decode.Arguments(
        query=query.data_ptr(), tokens=spans.offsets.data_ptr(), partial=out.data_ptr(),
        packed_tiles=records.data.data_ptr(), first_packed_tiles=records.first.data_ptr(),
        packed_tiles_per_head=records.data.shape[2], kv_heads=1, blocks=2, splits=1,
        k_scale=key.scale.data_ptr(), k_zero=key.zero_point.data_ptr(),
        v_scale=value.scale.data_ptr(), v_zero=value.zero_point.data_ptr(),
    )  # fmt: skip
    macros = span_decode.macros_of(records.format, calibrate=False) | {
        "CHANNELS": HEAD_DIM, "G": 1, "WARPS": WARPS, "STAGES": 3, "PAGED": 0, "QUERY": 2, "OUT": 2,
        "OVERLAP": 0, "MERGE": 0, "LATE": 0, "__CUDA_ARCH__": 900,
        "ARGUMENTS_BYTES": ctypes.sizeof(given),
    }  # fmt: skip
    compiled("read_parameters", macros, tmp_path, KERNEL)(given, (2, 1, 1), WARPS * 32)
    expected = [t[0, 0].float() for x in (key, value) for t in (x.scales, x.offset)]
    assert torch.equal(out, torch.stack(expected, 1))


def test_k_and_v_share_the_type_of_their_parameters() -> None:
    with pytest.raises(RefusedError, match="one type in K and V; got float8 and float16"):
        format_of(SPEC, TensorSpec(2), (64, 64))
