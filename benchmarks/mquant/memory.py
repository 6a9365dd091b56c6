"""Gigabytes of weights of Qwen2-VL-7B's shapes by recipe: MQuant's Tables 3 and 11; CPU.

    python -m benchmarks.mquant.memory --out DIR      memory.json

Every parameter counts once.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from duotone.hf.weights.checkpoint import empty_model
from duotone.hf.weights.weight_maps import weight_map
from duotone.report.provenance import stamp, write_new_json
from duotone.weights.equivalences.hadamard import plan_hadamard
from duotone.weights.equivalences.module_map import WeightMap, at
from duotone.weights.equivalences.residual import reading_linears

from .random_model import config

GROUP = 128


# Parts that a row has in 8 bits.
IN_8_BITS = {
    "W4A8, vision W8A8": ("vision",),
    "W4A8, head W8A8": ("head",),
}


def linear_bytes(out: int, columns: int, recipe: str, split: bool, bits: int = 4) -> int:
    """Bytes of a linear's weight: codes, scales and, for W4A8, what RMS keeps in 16 bit.

    W4A16: a 16-bit scale per group of 128; W4A8: a float32 scale per output channel, two static
    activation scales, padded columns and w0 at down_proj / fc2.
    """
    if recipe == "bf16":
        return 2 * out * columns
    if recipe == "W4A16":
        return out * columns // 2 + 2 * out * -(-columns // GROUP)
    padded = plan_hadamard(columns).padded if split else columns
    return out * padded * bits // 8 + 4 * out + 8 + (2 * out if split else 0)


def quantized_linears(found: WeightMap) -> dict[str, str]:
    """Path -> part of everything that is quantized: all linears but the head."""
    parts = {}
    for stream in found.streams:
        inner = [path for block in stream.blocks for b in block.branches for path in _of(b)]
        parts |= dict.fromkeys(inner, stream.name)
        outer = [*reading_linears(stream), *stream.writers]
        parts |= {path: "projector" for path in outer if path not in parts}
    return {path: part for path, part in parts.items() if path != found.head}


def _of(branch: Any) -> tuple[str, ...]:
    return (*branch.inputs, branch.output)


def memory_rows(model: nn.Module, found: WeightMap) -> list[dict[str, Any]]:
    """Bytes of each part of a model's weights under each recipe; every parameter counts once."""
    parts = {p: name for p, name in quantized_linears(found).items() if _is_linear(model, p)}
    split = {block.mlp_output for stream in found.streams for block in stream.blocks}
    rows = []
    for recipe in ("bf16", "W4A16", "W4A8", *IN_8_BITS):
        count: dict[str, int] = defaultdict(int)
        eight = IN_8_BITS.get(recipe, ())
        own = parts | ({found.head: "head"} if "head" in eight else {})
        for path, part in own.items():
            shape = at(model, path).weight.shape
            bits = 8 if part in eight else 4
            count[part] += linear_bytes(*shape, recipe, path in split, bits)
        for name, parameter in model.named_parameters():
            path, _, kind = name.rpartition(".")
            if not (path in own and kind == "weight"):
                kept = {found.embedding: "embedding", found.head: "head"}.get(path, "other, 16 bit")
                count[kept] += 2 * parameter.numel()
        rows.append({"recipe": recipe, **count, "total": sum(count.values())})
    return rows


def _is_linear(model: nn.Module, path: str) -> bool:
    return isinstance(at(model, path), nn.Linear)


def memory_7b() -> list[dict[str, Any]]:
    """`memory_rows` of Qwen2-VL-7B's shapes, without storage."""
    model = empty_model(config(tiny=False, layers=None), torch.bfloat16)
    return memory_rows(model, weight_map(model))


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for memory.json")
    data = {"schema": "duotone.mquant.memory/1", **stamp("cpu"), "rows": memory_7b()}
    print(write_new_json(parser.parse_args().out / "memory.json", data))


if __name__ == "__main__":
    main()
