"""CUDA kernels of this package: compiled with NVRTC, kept on disk, launched on torch's stream."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from duotone.tools.devices import facts, stream_handle
from duotone.tools.folders import user_folder

logger = logging.getLogger("duotone")
# From this capability on, a launch may begin while the previous launch ends.
OVERLAP_CAPABILITY = (9, 0)
INCLUDE = re.compile(r'^#include "(.+)"$', re.M)
ENTRY = re.compile(
    r'^extern "C" __global__ void\b(?:\s+__launch_bounds__\([^\n]*\))?\s+(\w+)\(', re.M
)


@cache
def has_compiler() -> bool:
    """True if cuda-core and its NVRTC are installed."""
    return find_spec("cuda") is not None and find_spec("cuda.core") is not None


def cache_folder() -> Path:
    """Folder of compiled binaries, in the user's (`user_folder`)."""
    return user_folder() / "cuda"


@dataclass(frozen=True)
class Sources:
    """The CUDA sources of one package, by their file names."""

    package: str

    def text(self, name: str) -> str:
        """A source file with its package's own headers inserted."""
        text = resources.files(self.package).joinpath(name).read_text(encoding="utf-8")
        return INCLUDE.sub(lambda match: self.text(match[1]), text)

    def entry(self, source: str) -> str:
        """Name of the only kernel of a source file. Errors: ValueError for none or several."""
        return _entry(self, source)

    def compiled(self, source: str, arch: str, macros: Mapping[str, int]) -> bytes:
        """The cubin of a source file, from disk or fresh from NVRTC.

        arch: e.g. "sm_90". Errors: RuntimeError with the compiler's log.
        """
        text = self.text(source)
        options = [f"{name}={value}" for name, value in sorted(macros.items())]
        key = hashlib.sha256("\0".join([text, arch, *options]).encode()).hexdigest()[:32]
        path = cache_folder() / f"{key}.cubin"
        if path.exists():
            return path.read_bytes()
        started = perf_counter()
        binary = _compile(text, arch, options)
        logger.info("compiled %s for %s in %.1f s", source, arch, perf_counter() - started)
        _keep(path, binary)
        return binary

    def kernel(
        self,
        source: str,
        name: str,
        macros: tuple[tuple[str, int], ...],
        device: torch.device,
        features: str = "",
    ) -> Kernel:
        """A kernel, compiled and loaded once per device.

        features: "a" for instructions of the device's own architecture alone.
        Errors: RuntimeError if it is new while a CUDA graph is captured.
        """
        return _kernel(self, source, name, macros, device, features)


@cache
def _entry(sources: Sources, source: str) -> str:
    names = ENTRY.findall(sources.text(source))
    if len(names) != 1:
        raise ValueError(f"{source} must have one kernel to be named by; got {names}.")
    return names[0]


def _compile(text: str, arch: str, options: list[str]) -> bytes:
    from cuda.core import Program, ProgramOptions

    settings = ProgramOptions(std="c++17", arch=arch, define_macro=options)
    return bytes(Program(text, "c++", settings).compile("cubin").code)


def _keep(path: Path, binary: bytes) -> None:
    """Write atomically; a folder that cannot be written costs a compilation per process."""
    own = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(binary)
        own.replace(path)
    except OSError as error:
        logger.info("kernels are not kept on disk: %s", error)


@dataclass(frozen=True)
class Launch:
    """Grid, threads per block, bytes of dynamic shared memory.

    blocks: their number, or that along x, y and z.

    cooperative: all blocks are resident together. cluster: neighbouring blocks that are resident
    together and read each other's shared memory. overlap: the launch may begin before the previous
    kernel in the stream ends. The kernel then has to wait before it reads the previous kernel's
    output.
    """

    blocks: int | tuple[int, int, int]
    threads: int
    shared_bytes: int
    cooperative: bool = False
    overlap: bool = False
    cluster: int = 1


class Kernel:
    """One function of a compiled source on one device.

    overlaps: the device can begin a launch while the previous launch ends.
    """

    def __init__(self, binary: bytes, name: str, overlaps: bool) -> None:
        from cuda.bindings import driver

        self._driver, self._overlaps = driver, overlaps
        self._module = self._call("cuModuleLoadData", binary)
        self._function = self._call("cuModuleGetFunction", self._module, name.encode())
        self._shared_bytes, self._lock = 0, threading.Lock()
        self._clusters: dict[tuple[int, int, int], int] = {}
        names = ("COOPERATIVE", "PROGRAMMATIC_STREAM_SERIALIZATION")
        self._attributes = {name: self._attribute(name) for name in names}

    def __call__(self, at: Launch, arguments: ctypes.Structure) -> PreparedLaunch:
        """Launch on the current stream with one structure as the only argument.

        Returns the launch, which can be made again.
        """
        launch = self.prepared(at, arguments)
        launch(stream_handle(torch.cuda.current_device()))
        return launch

    def prepared(self, at: Launch, arguments: ctypes.Structure) -> PreparedLaunch:
        """A launch with one structure as the only argument, which is yet to be made."""
        return PreparedLaunch(self, self._settings(at), arguments)

    def launch(self, settings: Any, values: int) -> None:
        """Launch with all settings made. values: address of the arguments' addresses."""
        self._call("cuLaunchKernelEx", settings, self._function, values, 0)

    def stream(self, handle: int) -> Any:
        """A stream as settings want it."""
        return self._driver.CUstream(handle)

    def clusters_at_once(self, at: Launch) -> int:
        """Clusters of such a launch that the device has room for."""
        key = at.threads, at.shared_bytes, at.cluster
        if key not in self._clusters:
            name, settings = "cuOccupancyMaxActiveClusters", self._settings(at)
            self._clusters[key] = self._call(name, self._function, settings)
        return self._clusters[key]

    def _settings(self, at: Launch) -> Any:
        self._allow(at.shared_bytes)
        settings = self._driver.CUlaunchConfig()
        grid = (at.blocks, 1, 1) if isinstance(at.blocks, int) else at.blocks
        settings.gridDimX, settings.gridDimY, settings.gridDimZ = grid
        settings.blockDimX, settings.blockDimY, settings.blockDimZ = at.threads, 1, 1
        settings.sharedMemBytes = at.shared_bytes
        attributes = self._launch_attributes(at)
        settings.attrs = attributes
        settings.numAttrs = len(attributes)
        return settings

    def _launch_attributes(self, at: Launch) -> list[Any]:
        overlaps = self._overlaps and at.overlap and not at.cooperative
        wanted = {"COOPERATIVE": at.cooperative, "PROGRAMMATIC_STREAM_SERIALIZATION": overlaps}
        attributes = [self._attributes[name] for name, is_wanted in wanted.items() if is_wanted]
        return [*attributes, self._cluster(at.cluster)] if at.cluster > 1 else attributes

    def _attribute(self, name: str) -> Any:
        """A launch attribute that is enabled."""
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = getattr(self._driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        if name == "COOPERATIVE":
            attribute.value.cooperative = 1
        else:
            attribute.value.programmaticStreamSerializationAllowed = 1
        return attribute

    def _cluster(self, blocks: int) -> Any:
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = blocks, 1, 1
        return attribute

    def _allow(self, shared_bytes: int) -> None:
        if shared_bytes <= self._shared_bytes:
            return
        # A thread that needs less must not set its own limit after one that needs more.
        with self._lock:
            most = max(shared_bytes, self._shared_bytes)
            names = self._driver.CUfunction_attribute
            attribute = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", self._function, attribute, most)
            self._shared_bytes = most

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *result = getattr(self._driver, name)(*arguments)
        if int(error) != 0:
            raise RuntimeError(f"{name} failed: {error}.")
        return result[0] if result else None


class PreparedLaunch:
    """One launch of a kernel, whose stream and addresses may change from call to call.

    arguments: read at every launch.
    """

    def __init__(self, kernel: Kernel, settings: Any, arguments: ctypes.Structure) -> None:
        self.kernel, self.settings, self.arguments = kernel, settings, arguments
        self._values = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self._address = ctypes.addressof(self._values)
        self._stream: int | None = None

    def __call__(self, stream: int) -> None:
        """Launch on a stream, by its handle."""
        if stream != self._stream:
            self.settings.hStream, self._stream = self.kernel.stream(stream), stream
        self.kernel.launch(self.settings, self._address)


@cache
def _kernel(
    sources: Sources,
    source: str,
    name: str,
    macros: tuple[tuple[str, int], ...],
    device: torch.device,
    features: str,
) -> Kernel:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} must be compiled and loaded before a CUDA graph is captured; run the same "
            "call, with tensors of the same sizes, once before the capture"
        )
    capability = facts(device).capability
    binary = sources.compiled(source, "sm_{}{}".format(*capability) + features, dict(macros))
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the context, if there is none yet
        return Kernel(binary, name, capability >= OVERLAP_CAPABILITY)
