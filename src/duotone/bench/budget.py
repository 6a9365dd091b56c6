"""A memory budget that the allocator enforces.

On a GPU the limit is `torch.cuda.set_per_process_memory_fraction`: the caching allocator may
reserve no more. Its rounding, its fragments and the private pools of CUDA graphs count, as on a
smaller card. Weights are loaded before, and do not count. A CPU has no such limit: there the bytes
of the caches are summed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def release() -> None:
    """Free all memory that is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def memory_limit(device: torch.device, held_bytes: int, budget_bytes: int) -> Iterator[None]:
    """Limit the allocator to the sum of both within the block."""
    if device.type != "cuda":
        yield
        return
    release()
    # The allocator needs the index of the device "cuda".
    device = torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )
    _, total = torch.cuda.mem_get_info(device)
    allowed = held_bytes + budget_bytes
    if allowed > total:
        raise ValueError(
            f"weights and budget take {allowed / 1e9:.1f} GB; this GPU has {total / 1e9:.1f} GB."
        )
    torch.cuda.set_per_process_memory_fraction(allowed / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def begin_peak(device: torch.device) -> int:
    """Begin a measurement of peak memory; bytes that are allocated before it."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def end_peak(device: torch.device, before: int) -> int | None:
    """Most bytes that were allocated beyond those `before`; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def check_budget(needed_bytes: int, budget_bytes: int) -> None:
    """Raise torch.OutOfMemoryError by arithmetic, where the allocator lets more pass."""
    if needed_bytes > budget_bytes:
        raise torch.OutOfMemoryError(f"{needed_bytes} bytes do not fit {budget_bytes}.")


def attempt(run: Callable[[int], T], batch: int) -> T | None:
    """Result of `run(batch)`, or None if memory runs out; all of its memory is released."""
    result = None
    try:
        result = run(batch)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
    release()
    return result


def _is_out_of_memory(error: BaseException | None) -> bool:
    """True for the error itself, a library's wording of it, or a capture that ran out of memory."""
    if error is None:
        return False
    words = str(error).lower()
    worded = "out of memory" in words or "alloc_failed" in words
    known = isinstance(error, torch.OutOfMemoryError)
    return known or worded or _is_out_of_memory(error.__context__)
