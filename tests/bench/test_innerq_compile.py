"""InnerQ's kernels compile for sm_90 without a GPU; run as a script, the interpreter being off."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the products are Triton kernels")

POINTERS = {"p_q": "*fp16", "p_p": "*fp16", "p_codes": "*u8", "p_scale": "*fp16"}
POINTERS |= {"p_zero": "*fp16"}


def compile_all() -> int:
    """How many variants compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from duotone.bench.innerq_kernels import TILES, scores_kernel, values_kernel

    compiled = 0
    for kernel, out in ((scores_kernel, "*fp16"), (values_kernel, "*fp32")):
        for inner in (True, False):
            for tokens, warps in TILES:
                constants = {"D": 128, "BITS": 2, "GROUP": 32, "INNER": inner, "BN": tokens}
                types = POINTERS | {"p_out": out}
                signature = {
                    name: "constexpr" if name in constants else types.get(name, "i32")
                    for name in kernel.arg_names
                }
                source = ASTSource(kernel, signature, constexprs=constants)
                target = GPUTarget("cuda", 90, 32)
                options = {"num_warps": warps}
                compiled += len(triton.compile(source, target, options).asm["cubin"]) > 1000
    return compiled


def test_every_tile_compiles():
    # The variable answers a deprecation warning of Triton 3.9; it changes nothing.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.split() == ["16"]


if __name__ == "__main__":
    print(compile_all())
