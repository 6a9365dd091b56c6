"""What is tried for the online Hadamard between an activation and codes: one launch or two."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product, zip_longest
from typing import Any

from torch import Tensor

from duotone.weights.kernels.triton.hadamard import HadamardConfig, hadamard_rows
from duotone.weights.kernels.triton.hadamard_base import BaseConfig
from duotone.weights.kernels.triton.hadamard_columns import ColumnsConfig
from duotone.weights.modules.online_hadamard import hadamard_quantize

import mquant_cases as cases

KIND = "prepare static"


def candidates() -> Iterator[tuple[str, str, int, Any]]:
    """(kind, linear, tokens, config): one launch, and two of small programs."""
    many = [(4,), (4, 128), (8,), (4, 168), (8, 128)]
    few = [(16, 4), (32, 4), (32, 8), (64, 4), (16, 8)]
    one_launch = [HadamardConfig(0, many=BaseConfig(*each)) for each in many]
    two = [HadamardConfig(1 << 30, few=ColumnsConfig(*each)) for each in few]
    for single, double in zip_longest(one_launch, two):
        for name, tokens in product(("down", "fc2"), (1, 16, 64, 256, 2048, 8192)):
            if tokens >= 16 and single is not None:
                yield KIND, name, tokens, single
            if tokens <= 2048 and double is not None:
                yield KIND, name, tokens, double


def codes(c: cases.Linear, config: HadamardConfig) -> Tensor:
    """By this configuration."""
    x, given = _before(c)
    return hadamard_rows(x, *cases.transform(c.ins), config=config, **given)[0]


def reference(c: cases.Linear) -> Tensor:
    """What they must be, but for ones."""
    x, given = _before(c)
    sizes = cases.transform(c.ins)
    return hadamard_quantize(x, given.pop("scale"), *sizes, impl="reference", **given)[0].codes


def _before(c: cases.Linear) -> tuple[Tensor, dict[str, Any]]:
    """What stands before the codes of a transformed input."""
    if c.before != "gate":
        return c.x, {"scale": c.rows, "activation": c.before}
    gate, up = c.x.chunk(2, 1)
    return gate, {"scale": c.rows, "activation": "silu", "up": up}
