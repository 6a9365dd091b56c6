"""Packing kernels compiled for the CPU by g++: their own source, with `cuda_on_cpu.h` before it."""

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from duotone.attention.cuda.shared import runtime

COMPILER = shutil.which("g++")
PROBE = ("-x", "c++", "-fsyntax-only", "-")
FLAGS = ("-std=c++20", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-w")
STANDARD = ("cassert", "cfenv", "cmath", "cstdint", "cstdlib", "cstring", "deque", "map", "vector")
# With BACKWARDS in the environment blocks and threads take turns in the other order.
MAIN = """
static const Arguments* given;
static unsigned running, threads_of_block;
static void thread() {{ {name}(*given); running--, idle = 0; while (true) yield(); }}
// Returns whether all threads have ended: 0 if they wait for each other.
extern "C" int launch(const Arguments* at, unsigned x, unsigned y, unsigned z, unsigned threads) {{
  const bool backwards = getenv("BACKWARDS");
  given = at, gridDim = {{x, y, z}};
  std::vector<std::vector<char>> stacks(threads, std::vector<char>(1 << 14));
  for (unsigned n = 0; n < x * y * z; n++) {{
    const unsigned i = backwards ? x * y * z - 1 - n : n;
    blockIdx = {{i % x, i / x % y, i / x / y}};
    memset(shared, 0xAA, sizeof shared);
    fibers.assign(threads, {{}}), board.assign(threads, 0), warps.assign(threads / 32, {{}});
    block = {{}}, running = threads;
    for (unsigned i = 0; i < threads; i++) {{
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = stacks[i].data(), fibers[i].uc_stack.ss_size = stacks[i].size();
      makecontext(&fibers[i], thread, 0);
    }}
    for (idle = 0; running; idle++) {{
      if (idle > 100) return 0;
      for (unsigned n = 0; n < threads; n++)
        threadIdx.x = backwards ? threads - 1 - n : n,
        swapcontext(&scheduler, &fibers[threadIdx.x]);
    }}
  }}
  return 1;
}}
"""


def grid_of(blocks: int | tuple[int, int, int]) -> tuple[int, int, int]:
    """Along x, y and z, as `nvrtc.Launch` has it."""
    return (blocks, 1, 1) if isinstance(blocks, int) else blocks


@cache
def missing() -> str | None:
    """Why kernels cannot be run here, or None."""
    if torch.cuda.is_available():
        return "a GPU runs them itself"
    if COMPILER is None:
        return "needs g++"
    probe = subprocess.run([COMPILER, *PROBE], input=b"_Float16 x;", capture_output=True)
    return None if probe.returncode == 0 else "needs a g++ with _Float16"


def compiled(
    source: str,
    name: str,
    macros: dict[str, int],
    folder: Path,
    source_text: Callable[[str], str] = runtime.source_text,
) -> Callable:
    """The launch function of a kernel. source_text: of a file with its headers."""
    text = source_text(source)
    device = runtime.source_text("packing/device.cuh")
    header = Path(__file__).with_suffix(".h").read_text()
    alone = "#define INPUT 0\n" + header + text
    text = text.replace(device, header) if device in text else alone
    text = re.sub(r"^ *extern __shared__ .*$", "", text, flags=re.M)
    text = re.sub(r"^ *#pragma unroll.*$", "", text, flags=re.M)
    text = "".join(f"#define {k} {v}\n" for k, v in macros.items()) + text + MAIN.format(name=name)
    return built(text, folder)


def built(text: str, folder: Path) -> Callable:
    """The launch function of a source, compiled once a folder."""
    base = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    library, source = base.with_suffix(".so"), base.with_suffix(".cc")
    if not library.exists():
        source.write_text(text)
        header = f"{_standard().name}/standard.h"
        _compile("-include", header, "-o", str(library), str(source))
    launch = ctypes.CDLL(str(library)).launch

    def checked(*given: object) -> None:
        assert launch(*given), "threads wait for each other"

    return checked


@cache
def _standard() -> TemporaryDirectory:
    """Folder of the standard library's headers, compiled ahead once a process."""
    folder = TemporaryDirectory(prefix="duotone-headers-")
    header = Path(folder.name) / "standard.h"
    header.write_text("".join(f"#include <{name}>\n" for name in STANDARD))
    _compile("-x", "c++-header", "-o", f"{header}.gch", str(header))
    return folder


def _compile(*arguments: str) -> None:
    subprocess.run([COMPILER, *FLAGS, *arguments], check=True)


def zeros(device: torch.device, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def own_counters(device: torch.device, count: int) -> tuple[int, torch.Tensor]:
    """Zeros for one launch, as `counters` of the kernels."""
    zeros = torch.zeros(count, dtype=torch.int32)
    return zeros.data_ptr(), zeros


def run_on_cpu(module, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let a module's launches run here, on CPU tensors, and torch divide as it does on CUDA."""

    def kernel(source, name, macros, device):
        launch = compiled(source, name, dict(macros), folder)
        return lambda at, given: launch(ctypes.byref(given), *grid_of(at.blocks), at.threads)

    monkeypatch.setattr(module, "kernel", kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(module, "counters", own_counters, raising=False)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 8, raising=False)
    monkeypatch.setattr(module, "max_cluster", lambda device: 1, raising=False)
    divide = torch.Tensor.__truediv__

    def by_reciprocal(x, y):
        known = isinstance(y, (int, float)) and x.dtype == torch.float32
        return x * (1 / torch.tensor(y, dtype=x.dtype)) if known else divide(x, y)

    monkeypatch.setattr(torch.Tensor, "__truediv__", by_reciprocal)
