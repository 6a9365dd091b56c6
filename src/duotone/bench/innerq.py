"""InnerQ's own table: both vector-matrix products by grouping, and quantization time by mapping.

Claims (InnerQ sec. 5.3, Tables 3-4, Figure 4; an RTX 4090): inner grouping takes up to 22 % less
time than outer. Inner grouping takes up to 88 % less than `torch.matmul` in half precision. Hybrid
quantization takes no longer than symmetric. Shape: batch 1 and Llama 3.1-8B's 32 heads, a vector
and a matrix each.

Where we differ: both groupings have asymmetric codes, so that both read the same bytes, and both
multiply by scales once per group of codes. `torch.matmul` reads K and V themselves; the paper's
times of `torch.matmul` belong to more bytes than K and V have. Quantization is ours in torch, from
16-bit K or V to packed codes, not the paper's fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from duotone.bench.problems import copy_of, random_packed
from duotone.bench.timing import METHODS, Clock, Deadline, clean_us, measure, rotated_count
from duotone.cache import BlockTable, PackedTensor, pack_tensor
from duotone.quant import TensorSpec

TOKENS = tuple(1 << power for power in range(9, 18))
HEADS, HEAD_DIM, BITS, GROUP = 32, 128, 2, 32
PRODUCTS, MAPPINGS = ("q K^T", "p V"), ("asymmetric", "symmetric", "hybrid")
GROUPINGS = ("torch.matmul", "outer", "inner")
# The number of tokens at which each kernel's tile is chosen, or the nearest below.
TILE_TOKENS = 8192
MAX_REPEATS_EAGER = 10
TOLERANCE = (2e-3, 1e-2)


@dataclass(frozen=True)
class Size:
    """Matrices (heads of a batch of 1) and their tokens."""

    tokens: int
    heads: int = HEADS
    head_dim: int = HEAD_DIM


def innerq_rows(
    clock: Clock,
    deadline: Deadline,
    repeats: int,
    progress: Callable[[str, int, int], None],
    tokens: Sequence[int] = TOKENS,
    heads: int = HEADS,
) -> dict[str, Any]:
    """{"products": rows, "quantization": rows, "stopped": reason for missing sizes, or None}.

    Errors: ValueError where a kernel differs from torch.
    """
    sizes = [Size(n, heads) for n in tokens]
    tiles = _choose_tiles(clock, sizes, repeats)
    products: list[dict] = []
    quantized: list[dict] = []
    stopped = None
    for done, size in enumerate(sizes):
        progress(f"InnerQ, {size.tokens} tokens", done, len(sizes))
        if deadline.passed:
            stopped = f"the time was over before {size.tokens} tokens (--minutes)"
            break
        clock.release()
        try:
            for product in PRODUCTS:
                products += _with_claims(_product_rows(clock, size, product, tiles, repeats))
            quantized += _quantization_rows(clock, size)
        except torch.OutOfMemoryError:
            stopped = f"out of memory at {size.tokens} tokens"
            break
    return {
        "status": "ok",
        "heads": heads,
        "head_dim": HEAD_DIM,
        "bits": BITS,
        "group": GROUP,
        "tiles": {f"{product}, {grouping}": tile for (product, grouping), tile in tiles.items()},
        "products": products,
        "quantization": quantized,
        "stopped": stopped,
    }


def spec_of(product: str, grouping: str) -> TensorSpec:
    """Spec of a grouping: inner has K in a token and V along tokens, outer the reverse."""
    in_token = (product == "q K^T") == (grouping == "inner")
    return TensorSpec(BITS, "channels" if in_token else "tokens", GROUP)


def product_call(
    product: str, vector: Tensor, matrix: PackedTensor | Tensor, tile: tuple[int, int] | None
) -> Callable[[], Tensor]:
    """The timed call. vector: [1, heads, 1, d or n]. matrix: [1, heads, n, d], packed or dense."""
    if isinstance(matrix, Tensor):
        transposed = matrix.transpose(-1, -2) if product == "q K^T" else matrix
        return lambda: torch.matmul(vector, transposed)
    from duotone.bench.innerq_kernels import packed_scores, packed_values

    kernel = packed_scores if product == "q K^T" else packed_values
    return lambda: kernel(vector, matrix, tile)


def _operands(size: Size, product: str, grouping: str, device: torch.device) -> tuple:
    """(vector, matrix)"""
    width = size.head_dim if product == "q K^T" else size.tokens
    vector = torch.randn(1, size.heads, 1, width, device=device, dtype=torch.float16)
    if grouping == "torch.matmul":
        shape = (1, size.heads, size.tokens, size.head_dim)
        return vector, torch.randn(shape, device=device, dtype=torch.float16)
    spec = spec_of(product, grouping)
    return vector, random_packed(1, size.heads, size.tokens, size.head_dim, spec, device)


def check_product(product: str, vector: Tensor, matrix: PackedTensor, out: Tensor) -> None:
    """Raise ValueError if `out` is not the product with the dequantized matrix."""
    dense = replace(matrix, dtype=torch.float64).dequantize()
    expected = product_call(product, vector.double(), dense, None)()
    error = out.double() - expected
    rms = float(error.norm() / expected.norm())
    worst = float(error.abs().max() / expected.abs().max())
    if out.shape != expected.shape or not (rms <= TOLERANCE[0] and worst <= TOLERANCE[1]):
        raise ValueError(
            f"the kernel of {product} must agree with torch to {TOLERANCE}; got {rms:.2e} (RMS), "
            f"{worst:.2e} (maximum): do not trust its times"
        )


def _choose_tiles(clock: Clock, sizes: Sequence[Size], repeats: int) -> dict[tuple, tuple]:
    """The fastest tile of each packed kernel at one size, after its results were checked."""
    from duotone.bench.innerq_kernels import TILES

    size = max((s for s in sizes if s.tokens <= TILE_TOKENS), default=sizes[0], key=_tokens)
    chosen = {}
    for product in PRODUCTS:
        for grouping in ("outer", "inner"):
            vector, matrix = _operands(size, product, grouping, clock.device)
            times = {}
            for tile in TILES:
                call = product_call(product, vector, matrix, tile)
                check_product(product, vector, matrix, call())
                times[tile] = clean_us(clock.capture([call]), clock, repeats)
            chosen[product, grouping] = min(times, key=times.__getitem__)
    return chosen


def _tokens(size: Size) -> int:
    return size.tokens


def _product_rows(
    clock: Clock, size: Size, product: str, tiles: Mapping[tuple, tuple], repeats: int
) -> list[dict[str, Any]]:
    rows = []
    for grouping in GROUPINGS:
        vector, matrix = _operands(size, product, grouping, clock.device)
        dense = isinstance(matrix, Tensor)
        nbytes = matrix.nbytes if dense else matrix.codes_bytes + matrix.params_bytes
        copies = max(1, rotated_count(nbytes, clock.free_bytes()))
        matrices = [matrix, *(copy_of(matrix) for _ in range(copies - 1))]
        tile = tiles.get((product, grouping))
        calls = [product_call(product, vector, one, tile) for one in matrices]
        for call in calls:
            call()
        times = measure(calls, clock, repeats)
        row = {"product": product, "tokens": size.tokens, "grouping": grouping}
        rows.append(row | {"bytes": nbytes, "us": times})
    return rows


def _with_claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one product and size with the share of time they save, as the paper counts it."""
    us = {row["grouping"]: row["us"] for row in rows}
    for row in rows:
        for other in GROUPINGS[:2]:
            row[f"less_time_than_{other}"] = {
                method: row["us"][method] and 1 - row["us"][method] / us[other][method]
                for method in METHODS
            }
    return rows


def _quantization_rows(clock: Clock, size: Size) -> list[dict[str, Any]]:
    """Time from dense K or V to packed codes in InnerQ's groups, by mapping; single eager calls."""
    shape = (1, size.heads, size.tokens, size.head_dim)
    states = torch.randn(shape, device=clock.device, dtype=torch.bfloat16)
    spans = BlockTable(torch.tensor([[0, size.tokens]], device=clock.device))
    rows = []
    for product, name in zip(PRODUCTS, ("K", "V"), strict=True):
        for mapping in MAPPINGS:
            spec = spec_of(product, "inner").replace(mapping=mapping)
            us = _eager_us(clock, lambda spec=spec: pack_tensor(states, spec, spans))
            rows.append({"tensor": name, "tokens": size.tokens, "mapping": mapping, "us": us})
    return rows


def _eager_us(clock: Clock, work: Callable[[], object]) -> float:
    """Time eager calls: quantizers synchronise between launches and cannot be captured."""
    work()
    clock.wait()
    times = sorted(clock.elapsed_us(work) for _ in range(MAX_REPEATS_EAGER))
    return times[len(times) // 2]
