"""Read binaries of CUDA and Triton kernels, and make Triton's without a GPU."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from typing import Any

import torch


def of_script(file: str) -> Any:
    """The JSON that a test file prints last as a script: compiling and interpreting exclude each
    other in one process, so that Triton's interpreter is off there.
    """
    # The variable answers a deprecation warning of Triton 3.9; it changes nothing.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run(
        [sys.executable, file], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def triton_assembly(kernel: Any, arguments: dict[str, Any], capability: int) -> dict[str, Any]:
    """All stages of a kernel that would be launched with these arguments, by name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constant = {p.name for p in kernel.params if p.is_constexpr}
    constant |= {name for name, value in arguments.items() if value is None}
    values = {name: arguments[name] for name in kernel.arg_names}
    plain = {p.name for p in kernel.params if p.do_not_specialize}
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in constant else type_name(v) for n, v in values.items()},
        constexprs={n: v for n, v in values.items() if n in constant},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, (n, v) in enumerate(values.items())
            if n not in constant | plain
            and (isinstance(v, torch.Tensor) or (isinstance(v, int) and v % 16 == 0))
        },
    )
    options = {
        n: arguments[n]
        for n in ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg")
        if n in arguments
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm


def type_name(value: Any) -> str:
    """Triton's name of an argument's type."""
    from triton.runtime.jit import type_canonicalisation_dict
    from triton.tools.tensor_descriptor import TensorDescriptor

    tensor = value.base if isinstance(value, TensorDescriptor) else value
    if isinstance(tensor, torch.Tensor):
        kind = type_canonicalisation_dict[str(tensor.dtype).removeprefix("torch.")]
        return f"*{kind}" if tensor is value else f"tensordesc<{kind}{value.block_shape}>"
    return "fp32" if isinstance(value, float) else "i32"


def sections(binary: bytes) -> dict[str, tuple[int, int]]:
    """(first byte, bytes) of each section of an ELF file."""
    (at,) = struct.unpack_from("<Q", binary, 40)
    size, count, of_names = struct.unpack_from("<HHH", binary, 58)
    headers = [struct.unpack_from("<IIQQQQ", binary, at + i * size) for i in range(count)]

    def name(header: tuple[int, ...]) -> str:
        start = headers[of_names][4] + header[0]
        return binary[start : binary.index(b"\0", start)].decode()

    return {name(header): header[4:6] for header in headers}


def shared_of(binary: bytes, function: str) -> int:
    """Bytes of shared memory that a cubin for sm_90 gives a function, CUDA's own included."""
    return sections(binary)[f".nv.shared.{function}"][1]


def stack_of(binary: bytes) -> int:
    """Bytes that a cubin's functions keep on the stack at most: registers that did not suffice."""
    at, nbytes = sections(binary)[".nv.info"]
    end, most, frame_size, has_payload = at + nbytes, 0, 0x11, 4
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", binary, at)
        if attribute == frame_size:
            most = max(most, struct.unpack_from("<I", binary, at + 8)[0])
        at += 4 + (size if form == has_payload else 0)
    return most
