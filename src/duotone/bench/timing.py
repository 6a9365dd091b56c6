"""Times of GPU work by three methods, medians.

    do_bench   triton.testing.do_bench of a captured graph: before each launch 256 MB are written,
               whose dirty lines the launch then has to evict from L2
    clean      isolated: one launch between two events, L2 flushed by reading, as it is called or as
               a captured graph, whichever takes less
    rotated    back-to-back: a graph of launches on different buffers, like the layers of a model

Timed work comes as functions without arguments. A clock does all that needs a device: `CudaClock`,
or `Clock` on a CPU. Whole calls of `generate` are timed by `generate_watch`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

METHODS = ("do_bench", "clean", "rotated")
FLUSH_BYTES = 512 << 20
# Number of reads: half a millisecond's worth, so that the next launch is queued meanwhile.
FLUSH_READS = 4
COPY_BYTES = 1 << 30
# Launches of a rotated graph, and the bytes that these launches touch together to outgrow any L2.
MIN_ROTATED, MAX_ROTATED = 8, 32
ROTATED_BYTES = 512 << 20
# Of a CPU, which has room for a few buffers of a small shape.
FREE_BYTES = 1 << 30
# Share of free memory that buffers may take: results and workspaces need some too.
MEMORY_SHARE = 0.8

Work = Callable[[], object]


class Clock:
    """A CPU by wall time, so that everything that times work runs without a GPU."""

    device = torch.device("cpu")

    def now_s(self) -> float:
        """Seconds of wall clock."""
        return time.perf_counter()

    def wait(self) -> None:
        """Wait until the device is idle."""

    def capture(self, work: Sequence[Work]) -> Work:
        """Capture all of `work`, which must have run before, as one graph; calling it replays."""
        return lambda: [one() for one in work]

    def flush(self) -> None:
        """Empty L2 without leaving lines in it that must be written back."""

    def elapsed_us(self, work: Work) -> float:
        """Microseconds of device time between an event before and one after."""
        started = self.now_s()
        work()
        return (self.now_s() - started) * 1e6

    def do_bench_us(self, work: Work, rep_ms: float) -> float:
        """The median that triton.testing.do_bench gives; on a CPU the time of one run."""
        return self.elapsed_us(work)

    def free_bytes(self) -> int:
        """Bytes of free device memory."""
        return FREE_BYTES

    def release(self) -> None:
        """Give cached device memory back."""


class CudaClock(Clock):
    """The current CUDA device."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                "bench needs a CUDA device, and torch sees none; run it on a machine with a GPU "
                "and a CUDA build of torch"
            )
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)

    def wait(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self.device)

    def capture(self, work: Sequence[Work]) -> Work:
        """Capture all of `work`, which must have run before, as one graph."""
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Results stay alive while the graph is captured: each launch writes its own.
            kept = [one() for one in work]
        del kept
        return graph.replay

    def flush(self) -> None:
        """Read more than L2 holds."""
        for _ in range(FLUSH_READS):
            self._flush.max()

    def elapsed_us(self, work: Work) -> float:
        """Microseconds of device time between an event before and one after."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def do_bench_us(self, work: Work, rep_ms: float) -> float:
        """The median that triton.testing.do_bench gives."""
        from triton.testing import do_bench

        return do_bench(work, warmup=5, rep=rep_ms, return_mode="median") * 1e3

    def free_bytes(self) -> int:
        """Bytes of free device memory."""
        return torch.cuda.mem_get_info(self.device)[0]

    def release(self) -> None:
        """Give cached device memory back."""
        torch.cuda.empty_cache()


class Deadline:
    """Time after which nothing new starts. minutes: from now on; None: never."""

    def __init__(self, clock: Clock, minutes: float | None) -> None:
        if minutes is not None and not minutes > 0:
            raise ValueError(f"--minutes must be above 0; got {minutes:g}; leave it out for all")
        self._now = clock.now_s
        self._end = math.inf if minutes is None else clock.now_s() + 60 * minutes

    @property
    def passed(self) -> bool:
        """True if the time is over."""
        return self._now() >= self._end


def rotated_count(nbytes: int, free_bytes: int) -> int:
    """Buffers of a rotated graph: at least 8 and 512 MB of them, as far as memory goes.

    nbytes: of one buffer. free_bytes: in addition to the first buffer. Fewer than 2: not possible.
    """
    wanted = max(MIN_ROTATED, -(-ROTATED_BYTES // max(1, nbytes)))
    return min(wanted, MAX_ROTATED, 1 + int(MEMORY_SHARE * free_bytes) // max(1, nbytes))


def clean_us(work: Work, clock: Clock, repeats: int) -> float:
    """Median of single launches with a cold L2."""
    times = []
    for _ in range(repeats):
        clock.flush()
        times.append(clock.elapsed_us(work))
    return median(times)


def rotated_us(replay: Work, launches: int, clock: Clock, repeats: int) -> float:
    """Median time per launch of a graph of `launches` launches on different buffers."""
    clock.elapsed_us(replay)  # The first replay uploads the graph.
    return median(clock.elapsed_us(replay) for _ in range(repeats)) / launches


def measure(work: Sequence[Work], clock: Clock, repeats: int) -> dict[str, float | None]:
    """{method: us} of one launch. work: the same launch on different buffers, all run before.

    With a single buffer there is no rotated time: None.
    """
    single = clock.capture(work[:1])
    single()
    times: dict[str, float | None] = {
        "do_bench": clock.do_bench_us(single, rep_ms=repeats),
        # A graph of one kernel starts later than the kernel; many small ones are faster in a graph.
        "clean": min(clean_us(one, clock, repeats) for one in (work[0], single)),
        "rotated": None,
    }
    if len(work) > 1:
        times["rotated"] = rotated_us(clock.capture(work), len(work), clock, repeats)
    return times


def copy_tb_per_s(clock: Clock, repeats: int = 20, nbytes: int = COPY_BYTES) -> float:
    """Bandwidth of a device-to-device copy in TB/s, bytes read and written counted."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    target.copy_(source)
    us = median(clock.elapsed_us(lambda: target.copy_(source)) for _ in range(repeats))
    return 2 * nbytes / us / 1e6
