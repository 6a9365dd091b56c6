"""Linear kernels compile for Hopper without a GPU, which catches what the interpreter cannot.

Compiling and interpreting exclude each other in one process, so this file runs itself as a script
with the interpreter off, once for all variants.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from cubins import of_script, stack_of, triton_assembly

pytest.importorskip("triton", reason="the kernels need triton")


def launches() -> dict[str, Callable[[], Any]]:
    """Launches of a model's decode step and of a middle number of tokens."""
    found = products() | steps() | transforms()
    for name in ("gemv_kernel, 4 bits", "split_kernel, 16 tokens, 4 bits", "gemm_kernel"):
        found[f"{name}, groups of 128"] = products(128)[name]
    # of 32, 16 bytes: a path of its own
    found["split_kernel, groups of 32"] = products(32)["split_kernel, 16 tokens, 4 bits"]
    return found


def products(group: int | None = None) -> dict[str, Callable[[], Any]]:
    """Integer products, with one scale per channel or per group."""
    from duotone.weights.kernels.configs import gemm_config, gemv_config, split_config
    from duotone.weights.kernels.triton import gemm as triton_gemm
    from duotone.weights.kernels.triton import gemv as triton_gemv
    from duotone.weights.kernels.triton import split as triton_split

    from linear_cases import random_problem

    def gemv(bits: int) -> None:
        p = random_problem(1, 4608, 3584, bits, group=group)
        triton_gemv.gemv(*p.arguments, torch.bfloat16, gemv_config(p.weight))

    def split(tokens: int, bits: int) -> None:
        p = random_problem(tokens, 256, 3584, bits, group=group)
        config = split_config(tokens, p.weight)
        triton_split.split_linear(*p.arguments, torch.bfloat16, config)

    def gemm(parts: int) -> None:
        p = random_problem(300, 256, 3584, 8, group=group)
        given = (p.x_q, p.row_scale, p.weight.codes, p.weight, None, None, torch.bfloat16)
        config = replace(gemm_config(1024 if parts == 1 else 300, p.weight), parts=parts)
        # twelve tiles of 128 x 64 in rounds of five: two are left
        with mock.patch.object(triton_gemm, "multiprocessors", return_value=5):
            triton_gemm.gemm_w8a8(*given, config)

    return {
        "gemv_kernel, 4 bits": lambda: gemv(4),
        "gemv_kernel, 8 bits": lambda: gemv(8),
        "split_kernel, 16 tokens, 4 bits": lambda: split(16, 4),
        "split_kernel, 64 tokens, 4 bits": lambda: split(64, 4),
        "split_kernel, 16 tokens, 8 bits": lambda: split(16, 8),
        "gemm_kernel": lambda: gemm(1),
        "gemm_kernel, parts": lambda: gemm(4),
    }


def steps() -> dict[str, Callable[[], Any]]:
    """Other launches of a decode step."""
    from duotone.weights.kernels.configs import split_config
    from duotone.weights.kernels.triton import rows as triton_rows
    from duotone.weights.kernels.triton import split as triton_split

    from linear_cases import random_weight

    def w4a16() -> None:
        weight, x = random_weight(256, 3584, 4, group=128), torch.zeros(16, 3584).bfloat16()
        config = split_config(16, weight, floating=True)
        triton_split.split_linear(x, torch.ones(1), weight, None, None, torch.bfloat16, config)

    def norm() -> None:
        x = torch.zeros(1, 3584).bfloat16()
        given = {"norm": "rms", "eps": 1e-6, "weight": torch.ones(3584)}
        triton_rows.rows_quantize(x, torch.ones(1), **given)

    def dynamic() -> None:
        gate, up = torch.zeros(1, 2 * 18944).bfloat16().chunk(2, 1)
        triton_rows.rows_quantize(gate, None, up=up, activation="silu")

    return {"split_kernel, W4A16": w4a16, "rows_kernel": norm, "long_rows_kernel": dynamic}


def transforms() -> dict[str, Callable[[], Any]]:
    """Online Hadamards without a base, and with one of few and of many rows."""
    from duotone.weights.kernels.triton.hadamard import hadamard_rows

    def gated(tokens: int, blocks: int, m: int, p: int, split: bool = False) -> None:
        gate, up = torch.zeros(tokens, 2 * blocks * m * p).bfloat16().chunk(2, 1)
        base = None if m == 1 else torch.ones(m, m, dtype=torch.int8)
        given = {"scale": torch.ones(1), "up": up, "activation": "silu", "split": split}
        hadamard_rows(gate, blocks, base, p, **given)

    def dense(m: int, p: int, dtype: torch.dtype) -> None:
        base = torch.ones(m, m, dtype=torch.int8)
        hadamard_rows(torch.zeros(300, m * p, dtype=dtype), 1, base, p)

    def padded(tokens: int) -> None:
        # 3,420 channels of Qwen2.5-VL's tower in 108 * 32, behind an activation with signs
        x = torch.zeros(tokens, 3420).bfloat16()
        signs = torch.ones(3420).bfloat16().expand(tokens, -1)
        base = torch.ones(108, 108, dtype=torch.int8)
        given = {"scale": torch.ones(1), "up": signs, "activation": "gelu_tanh", "split": True}
        hadamard_rows(x, 1, base, 32, **given)

    return {
        "sylvester_kernel": lambda: gated(1, 37, 1, 512),
        "sylvester_kernel, before a base": lambda: gated(1, 1, 148, 128),
        "sylvester_kernel, fp32": lambda: dense(148, 128, torch.float32),
        "columns_kernel": lambda: gated(1, 1, 148, 128),
        "columns_kernel, fp32": lambda: dense(148, 128, torch.float32),
        "columns_kernel, padded": lambda: padded(1),
        "base_kernel": lambda: gated(300, 1, 148, 128),
        "base_kernel, split": lambda: gated(300, 1, 148, 128, split=True),
        "base_kernel, four tiles": lambda: gated(300, 1, 28, 1024),
        "base_kernel, a power of two": lambda: gated(300, 1, 1, 16384),
        "base_kernel, few rows": lambda: gated(150, 1, 28, 512),
        "base_kernel, dense": lambda: dense(28, 1024, torch.bfloat16),
        "base_kernel, padded": lambda: padded(300),
    }


class Recorder:
    """Stands for a kernel; keeps what it would be launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.named = kernel, {}

    def __getitem__(self, grid: Any) -> Callable:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.named = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs

        return launch


def compile_all() -> dict[str, dict[str, Any]]:
    """{launch: {cubin: bytes, overlaps, waits, spills: bytes, ...}}."""
    from duotone.weights.kernels.triton import gemm as triton_gemm
    from duotone.weights.kernels.triton import gemv as triton_gemv
    from duotone.weights.kernels.triton import hadamard_base as triton_hadamard_base
    from duotone.weights.kernels.triton import hadamard_columns as triton_hadamard_columns
    from duotone.weights.kernels.triton import rows as triton_rows
    from duotone.weights.kernels.triton import split as triton_split
    from duotone.weights.kernels.triton import sylvester as triton_sylvester

    modules = (triton_gemm, triton_gemv, triton_split)
    modules += (triton_rows, triton_sylvester, triton_hadamard_base, triton_hadamard_columns)
    found = {}
    for name, run in launches().items():
        kernel = name.split(",")[0]
        module = next(m for m in modules if hasattr(m, kernel))
        recorder = Recorder(getattr(module, kernel))
        with (
            mock.patch.object(module, kernel, recorder),
            mock.patch.object(module, "overlaps", return_value=True, create=True),
            beside(module, triton_sylvester),
        ):
            run()
        asm = triton_assembly(recorder.kernel, recorder.named, 90)
        before, waits, _ = asm["ptx"].partition("griddepcontrol.wait")
        found[name] = {
            "cubin": len(asm["cubin"]),
            "overlaps": recorder.named.get("launch_pdl", False),
            "waits": bool(waits),
            "loads before": before.count("ld.global") + before.count("cp.async"),
            "stores before": before.count("st.global"),
            "spills": stack_of(asm["cubin"]),
            "parts": recorder.named.get("parts"),
            "bytes loaded singly": len(re.findall(r"ld\.global\S*\.[bsu]8\b", asm["ptx"])),
            "tensor cores of a warp group": "wgmma.mma_async" in asm["ptx"],
        }
    return found


def beside(module: Any, other: Any) -> Any:
    """Allow only the launch in question, of the two of a Hadamard."""
    from duotone.weights.kernels.triton import hadamard as triton_hadamard

    name = "base_columns" if module is other else "sylvester_rows"
    return mock.patch.object(triton_hadamard, name)


def test_kernels_of_a_decode_step_compile_and_wait() -> None:
    found = of_script(__file__)
    assert all(one["cubin"] > 1000 for one in found.values())
    waiting = {name: one for name, one in found.items() if one["overlaps"]}
    assert {n.split(",")[0] for n in found} - {n.split(",")[0] for n in waiting} == {"gemm_kernel"}
    assert all(one["waits"] and not one["stores before"] for one in waiting.values()), found
    early = {name.split(",")[0] for name, one in waiting.items() if one["loads before"]}
    # weights and tables; everything else is read after the wait
    assert early == {"gemv_kernel", "columns_kernel", "rows_kernel"}
    assert found["gemm_kernel, parts"]["parts"] == 2
    bases = [one for name, one in found.items() if name.startswith(("base_", "columns_"))]
    assert all(one["tensor cores of a warp group"] for one in bases), found
    assert not any(one["bytes loaded singly"] for one in bases), found
    assert not [name for name, one in found.items() if one["spills"]], found


if __name__ == "__main__":
    print(json.dumps(compile_all()))
