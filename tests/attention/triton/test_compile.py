"""Kernels compile to cubins without a GPU, which catches what the interpreter cannot.

Compiling and interpreting exclude each other in one process, so this file runs itself as a script
with the interpreter off, once for all variants.
"""

import json
import os
from typing import Any
from unittest import mock

import pytest
import torch

from cubins import of_script, triton_assembly
from duotone.quant import TensorSpec

from cases import CLASSES_KEY, CLASSES_VALUE, INNERQ_KEY, INNERQ_VALUE, PRESET_KEY, SMALL

pytest.importorskip("triton", reason="the Triton path needs triton")

WHOLE, PER_TOKEN = TensorSpec(1), TensorSpec(4, "channels")
SYMMETRIC = TensorSpec(2, mapping="symmetric")
SMALL_2 = TensorSpec(2, param_dtype="float8")
# Case fields, and the compute capability to compile for.
VARIANTS = {
    "1 bit, calibrated": (
        {"key": WHOLE, "value": WHOLE, "head_dim": 128, "tau": (0.0, 3.0), "mask": True},
        90,
    ),
    "2 bit, groups of 32": (
        {"key": TensorSpec(2, group=32), "value": TensorSpec(2, "channels", 32), "dense": (9,)},
        80,
    ),
    "4 bit, head_dim 80, per token": ({"key": PER_TOKEN, "value": PER_TOKEN, "head_dim": 80}, 90),
    "classes of K in groups, 1 bit V: the preset": (
        {"key": PRESET_KEY, "value": WHOLE, "head_dim": 128},
        90,
    ),
    "classes of K and V, calibrated": (
        {"key": CLASSES_KEY, "value": CLASSES_VALUE, "head_dim": 128, "tau": (0.0, 3.0)},
        80,
    ),
    "parameters of 8 bits, of classes": (
        {"key": SMALL[0], "value": SMALL[1], "head_dim": 128, "tau": (0.0, 3.0)},
        90,
    ),
    "parameters of 8 bits, of equal channels": (
        {"key": SMALL_2.replace(group=32), "value": SMALL_2, "head_dim": 80},
        80,
    ),
    "InnerQ's slots": (
        {"key": INNERQ_KEY, "value": INNERQ_VALUE, "head_dim": 128, "tau": (0.0, 3.0)},
        90,
    ),
    "slots in longer groups the other way": (
        {"key": INNERQ_VALUE.replace(group=64), "value": INNERQ_KEY.replace(group=None)},
        90,
    ),
    "planes of signs": (
        {"key": SYMMETRIC, "value": SYMMETRIC.replace(mapping="hybrid"), "head_dim": 96},
        80,
    ),
    "head_dim 512, signs in groups": (
        {
            "key": SYMMETRIC.replace(group=32),
            "value": SYMMETRIC.replace(along="channels", group=32),
            "head_dim": 512,
        },
        90,
    ),
    "fp32 queries": (
        {"key": TensorSpec(8, "span"), "value": TensorSpec(4), "dtype": torch.float32},
        90,
    ),
}


def _compile_all() -> dict[str, int]:
    """Bytes of each kernel's cubin, by variant and kernel."""
    from cases import Case, build

    sizes = {}
    for name, (fields, capability) in VARIANTS.items():
        case = Case((40,), **fields)
        for kernel, arguments in _recorded_launches(*build(case), case):
            cubin = triton_assembly(kernel, arguments, capability)["cubin"]
            sizes[f"{name}, {kernel.__name__}, {arguments.get('K_KIND', '')}"] = len(cubin)
    return sizes


def _recorded_launches(query: Any, kv: Any, case: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Launches of the wrapper: kernels with all their arguments by name."""
    from duotone.attention.triton import decode as triton_decode

    launches = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                named = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
                launches.append((self.kernel, named))

            return launch

    names = (
        "segment_kernel",
        "score_range_kernel",
        "merge_kernel",
        "fold_kernel",
        "class_order_kernel",
    )
    kernels = {name: Recorder(getattr(triton_decode, name)) for name in names}
    with (
        mock.patch.multiple(triton_decode, **kernels),
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
    ):
        triton_decode.decode_attention_triton(query, kv, sm_scale=case.sm_scale, tau=case.tau)
    return launches


def test_representative_variants_compile() -> None:
    sizes = of_script(__file__)
    kernels = (
        "score_range_kernel",
        "segment_kernel, block",
        "segment_kernel, dense",
        "merge_kernel",
        "fold_kernel",
        "class_order_kernel",
    )
    assert all(any(kernel in name for name in sizes) for kernel in kernels)
    # A segment each and the merge; a dense segment, 10 folds of q, 4 score ranges, 2 orders.
    assert len(sizes) == 2 * len(VARIANTS) + 17
    assert all(size > 1000 for size in sizes.values())


if __name__ == "__main__":
    print(json.dumps(_compile_all()))
