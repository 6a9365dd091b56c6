"""Without a GPU, Triton kernels run in its interpreter: to be chosen before the import."""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duotone.tools.nvrtc import PreparedLaunch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for the CUDA sources that a test compiles."""
    pytest.importorskip("cuda.core", reason="compiling CUDA sources needs cuda-core and NVRTC")
    monkeypatch.setenv("DUOTONE_CACHE", str(tmp_path))
    return tmp_path / "cuda"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for CUDA sources that are compiled for the CPU, each once."""
    return tmp_path_factory.mktemp("cuda_on_cpu")


@dataclass
class Caught:
    """One launch: the kernel's file, its macros, the grid and the structure of arguments."""

    source: str
    macros: dict
    at: Any
    given: Any


@dataclass
class CaughtKernel:
    """A kernel whose launches are noted, with a copy of their arguments."""

    source: str
    macros: dict
    launches: list[Caught]

    def __call__(self, at, given) -> PreparedLaunch:
        self.given = given
        launch = PreparedLaunch(self, SimpleNamespace(at=at), given)
        launch(0)
        return launch

    def stream(self, handle: int) -> int:
        return handle

    def launch(self, settings, values: int) -> None:
        copied = type(self.given).from_buffer_copy(self.given)
        self.launches.append(Caught(self.source, self.macros, settings.at, copied))


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> list[Caught]:
    """The launches of a test, which do not happen, as for a device with 132 multiprocessors."""
    from duotone.attention.cuda.classes import decode as class_decode
    from duotone.attention.cuda.dense import decode as dense_decode
    from duotone.attention.cuda.groups import decode as group_decode
    from duotone.attention.cuda.rotate import merge as merge_rotated
    from duotone.attention.cuda.rotate import queries as rotate_queries
    from duotone.attention.cuda.shared import launch
    from duotone.attention.cuda.shared.runtime import source_text
    from duotone.attention.cuda.spans import decode as span_decode

    from cuda_on_cpu import own_counters

    launches: list[Caught] = []

    def kernel(source, name, macros, device):
        assert f"\n    {name}(const" in source_text(source)
        return CaughtKernel(source, dict(macros), launches)

    for module in (launch, rotate_queries):
        monkeypatch.setattr(module, "kernel", kernel)
    monkeypatch.setattr(launch, "counters", own_counters)
    decodes = (span_decode, dense_decode, class_decode, group_decode)
    for module in (launch, *decodes, rotate_queries, merge_rotated):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    # No stream to wait for.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return launches
