"""Decode attention by Triton on a real GPU: the tests first, then times and bandwidth.

    PYTHONPATH=src python benchmarks/kernel_check.py --out results/triton.json

Times are medians of single CUDA-graph replays, each after a read of more bytes than L2 holds
("clean" in KERNELS.md; a write would leave lines to evict). The baseline is 16-bit SDPA, the
fastest of its fused backends, by the same method. Bytes are the codes and parameters of K and V.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import duotone
from duotone.attention.triton_decode import decode_attention_triton
from duotone.cache import BlockTable, PackedSegment, PackedTensor
from duotone.provenance import commit
from duotone.quant import TensorSpec, pack
from duotone.quant.classes import CLASS_BITS, assign_classes, class_counts
from duotone.quant.packing import packed_bytes
from duotone.quant.slots import fill_slots, slot_bytes

# batch, q_heads, kv_heads, tokens
SHAPES = [(32, 32, 8, 8192), (8, 32, 8, 32768), (1, 32, 8, 131072)]
HEAD_DIM = 128
BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Scheme:
    """What K and V are quantized to in one row of the table."""

    name: str
    key: TensorSpec
    value: TensorSpec
    tau: tuple[float, float] | None = None


def schemes() -> list[Scheme]:
    """Whole-span scales at 1, 2 and 4 bits with and without calibration, groups of 32, ours."""
    rows = [
        Scheme(f"{bits} bit{', tau' if tau else ''}", TensorSpec(bits), TensorSpec(bits), tau)
        for bits in (1, 2, 4)
        for tau in (None, (0.0, 3.0))
    ]
    kivi = (TensorSpec(2, group=32), TensorSpec(2, "channels", 32))
    innerq = (
        TensorSpec(2, "channels", 32, mapping="hybrid"),
        TensorSpec(2, group=32, mapping="hybrid"),
    )
    preset = duotone.scheme("duotone").visual
    return [
        *rows,
        Scheme("kivi 2 bit, g=32", *kivi),
        Scheme("innerq 2 bit, g=32", *innerq),
        Scheme("duotone", preset.key, preset.value),
    ]


def random_packed(batch: int, heads: int, tokens: int, spec: TensorSpec) -> PackedTensor:
    """Random codes with scales that give scores of a standard deviation near 1."""
    edges = list(range(0, tokens, spec.group or tokens)) if spec.along == "tokens" else [0]
    blocks = BlockTable(torch.tensor([[*edges, tokens]] * batch, device="cuda"))
    if spec.along == "tokens":
        shape = (batch, heads, blocks.blocks, HEAD_DIM)
    else:
        shape = (batch, heads, tokens, HEAD_DIM // (spec.group or HEAD_DIM))
    counts = class_counts(spec, HEAD_DIM) if spec.classes else [(spec.bits, shape[-1])]
    levels = torch.tensor([1 << bits for bits, count in counts for _ in range(count) if bits])
    numbers = assign_classes(torch.rand(shape, device="cuda"), spec) if spec.classes else None
    scale = torch.rand(*shape[:3], len(levels), device="cuda") + 1
    return PackedTensor(
        spec=spec,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        blocks=blocks,
        codes=torch.randint(
            0, 256, (batch, heads, tokens, row_bytes(spec)), dtype=torch.uint8, device="cuda"
        ),
        scale=(scale / levels.cuda()).half(),
        classes=None if numbers is None else pack(numbers, CLASS_BITS),
        **random_offsets(spec, shape),
    )


def random_offsets(spec: TensorSpec, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """zero_points of groups; for a hybrid slots, half of them with signs, and the modes."""
    zero_point = (torch.rand(shape, device="cuda") - 1).half()
    if spec.mapping == "asymmetric":
        return {"zero_point": zero_point}
    signs = torch.rand(*shape, spec.group, device="cuda") < 0.5
    modes = torch.rand(shape, device="cuda") < 0.5
    slots = fill_slots(zero_point, signs, modes, slot_bytes(spec, HEAD_DIM))
    return {"slot": slots, "symmetric": pack(modes.byte(), 1)}


def row_bytes(spec: TensorSpec) -> int:
    """Bytes of one token's codes."""
    counts = class_counts(spec, HEAD_DIM) if spec.classes else [(spec.bits, HEAD_DIM)]
    return sum(packed_bytes(count, bits) for bits, count in counts)


def clean_time_us(function: Callable[[], object], flush: Tensor, repeats: int) -> float:
    """Median time of one launch of a captured graph with a cold L2."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.max()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times)


def baseline_us(shape: tuple[int, int, int, int], flush: Tensor, repeats: int) -> dict[str, float]:
    """SDPA on bf16 K and V: time by backend, for those that run this shape."""
    batch, q_heads, kv_heads, tokens = shape
    query = torch.randn(batch, q_heads, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    key, value = (
        torch.randn(batch, kv_heads, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    times = {}
    for backend in BACKENDS:
        with sdpa_kernel(backend), warnings.catch_warnings():
            # Backends that decline say why, at length.
            warnings.simplefilter("ignore")
            try:
                times[backend.name] = clean_time_us(
                    lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
                    flush,
                    repeats,
                )
            except RuntimeError:
                # A backend that does not take GQA or this shape is no baseline.
                continue
    return times


def measure(shape: tuple[int, int, int, int], scheme: Scheme, flush: Tensor, repeats: int) -> dict:
    """Time one scheme on one shape."""
    batch, q_heads, kv_heads, tokens = shape
    lengths = torch.full((batch,), tokens, device="cuda")
    key, value = (random_packed(batch, kv_heads, tokens, s) for s in (scheme.key, scheme.value))
    segment = PackedSegment(key, value, lengths, visual=True)
    query = torch.randn(batch, q_heads, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def run() -> Tensor:
        return decode_attention_triton(query, [segment], sm_scale=HEAD_DIM**-0.5, tau=scheme.tau)

    us = clean_time_us(run, flush, repeats)
    used = sum(t.codes_bytes + t.params_bytes for t in (key, value))
    return {"scheme": scheme.name, "us": us, "bytes": used, "terabytes_per_s": used / us / 1e6}


def dequantized_us(shape: tuple[int, int, int, int], flush: Tensor, repeats: int) -> float:
    """What the kernel replaces: dequantize 1-bit K and V with torch, then SDPA."""
    batch, q_heads, kv_heads, tokens = shape
    spec = TensorSpec(1)
    key, value = (random_packed(batch, kv_heads, tokens, spec) for _ in range(2))
    query = torch.randn(batch, q_heads, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def run() -> Tensor:
        return F.scaled_dot_product_attention(
            query, _dequantize(key), _dequantize(value), enable_gqa=True
        )

    with sdpa_kernel(list(BACKENDS)):
        return clean_time_us(run, flush, repeats)


def _dequantize(x: PackedTensor) -> Tensor:
    return torch.addcmul(
        x.zero_point.to(torch.bfloat16), x.unpacked().to(torch.bfloat16), x.scale.bfloat16()
    )


def environment() -> dict[str, str]:
    """What the numbers belong to."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": str(torch.version.cuda),
        "commit": commit() or "unknown",
    }


def run_tests() -> None:
    """The gate: no time is worth anything from a kernel that is wrong."""
    plain = ["-o", "addopts=", "-p", "no:benchmark", "-m", "gpu", "-q", "-x"]
    workers = ["-n", str(min(12, os.cpu_count() or 1))]
    subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *workers, "tests/attention"], check=True
    )


def main() -> None:
    """Run the tests, time every row, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--skip-tests", action="store_true")
    arguments = parser.parse_args()
    if not arguments.skip_tests:
        run_tests()
    flush = torch.randint(0, 9, (FLUSH_BYTES // 4,), dtype=torch.int32, device="cuda")
    rows = []
    for shape in SHAPES:
        sdpa = baseline_us(shape, flush, arguments.repeats)
        unpacked = dequantized_us(shape, flush, 5)
        for scheme in schemes():
            row = measure(shape, scheme, flush, arguments.repeats)
            best = min(sdpa.values())
            rows.append({"shape": shape, **row, "sdpa_us": sdpa, "speedup": best / row["us"]})
            rows[-1] |= {"dequantize_then_sdpa_us": unpacked}
            torch.cuda.empty_cache()
    result = {
        "environment": environment(),
        "method": "median of single graph replays, L2 flushed by reading",
        "head_dim": HEAD_DIM,
        "repeats": arguments.repeats,
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result["environment"]))
    titles = ("us", "TB/s", "SDPA us", "x SDPA", "x dequantized")
    print(f"{'B,Hq,Hkv,n':<16} {'scheme':<18}" + "".join(f"{title:>15}" for title in titles))
    for row in rows:
        shape = ",".join(map(str, row["shape"]))
        numbers = (
            row["us"],
            row["terabytes_per_s"],
            min(row["sdpa_us"].values()),
            row["speedup"],
            row["dequantize_then_sdpa_us"] / row["us"],
        )
        print(f"{shape:<16} {row['scheme']:<18}" + "".join(f"{number:15.2f}" for number in numbers))


if __name__ == "__main__":
    main()
