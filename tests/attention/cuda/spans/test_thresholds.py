"""Thresholds of a channel give the codes that arithmetic gives, for every 16-bit number."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

from duotone.attention.cuda.shared import runtime

import cuda_on_cpu
from cuda_on_cpu import COMPILER, FLAGS, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
# How many 16-bit numbers but NaNs get another code from thresholds.
CHECK = """
template <int BITS>
static int wrong_codes(u16 scale, u16 zero) {
  Levels l = {};
  l.read(scale, zero);
  Coder<BITS> coder;
  coder.set(l);
  int wrong = 0;
  u32 edges[3];
  for (int n = 0; n < (1 << BITS) - 1; n++) edges[n] = threshold(coder, l, n + 1);
  for (u32 bits = 0; bits < 65536; bits++) {
    const float x = number(Pair{bits}, 0);
    int code = 0;
    for (int n = 0; n < (1 << BITS) - 1; n++) code += x >= number(Pair{edges[n]}, 0);
    wrong += !isnan(x) && code != (int)coder.code(x - l.zero);
  }
  return wrong;
}
extern "C" int wrong(u16 scale, u16 zero) {
  return wrong_codes<1>(scale, zero) + wrong_codes<2>(scale, zero);
}
"""
HEADERS = ("packing/levels.cuh", "packing/codes.cuh", "spans/thresholds.cuh")


@pytest.fixture(scope="module", params=[0, 1], ids=["fp16", "bf16"])
def wrong(request, tmp_path_factory):
    """Wrong thresholds of a scale and a zero-point, as bits of fp16."""
    folder = tmp_path_factory.mktemp("thresholds")
    header = Path(cuda_on_cpu.__file__).with_suffix(".h").read_text()
    text = "".join(runtime.source_text(name) for name in HEADERS)
    text = re.sub(r"^ *#pragma unroll.*$", "", text, flags=re.M)
    # What loads a tile is not needed here.
    text = text[: text.index("// Thresholds in shared memory")]
    source, library = folder / "check.cc", folder / "check.so"
    source.write_text(f"#define INPUT {request.param}\n{header}{text}{CHECK}")
    subprocess.run([COMPILER, *FLAGS, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library)).wrong


def half_bits(x: float) -> int:
    return int(torch.tensor(x).clamp(-65504, 65504).half().view(torch.int16)) & 0xFFFF


@pytest.mark.parametrize("scale", [0.0, 2**-24, 3e-5, 0.1, 1.0, 1.7, 300.0, 65504.0])
def test_thresholds_give_the_same_codes(wrong, scale) -> None:
    # -scale / 2 and such: an edge beside 0, where numbers lie closest.
    for zero in (0.0, -0.5 * scale, -1.5 * scale, -2.5 * scale, -3.1 * scale, 0.3, -700.0):
        assert wrong(half_bits(scale), half_bits(zero)) == 0
