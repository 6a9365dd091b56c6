"""A clock without a GPU: work runs, time is made up."""

from collections.abc import Callable, Sequence

import torch

from duotone.bench.timing import Clock


class FakeClock(Clock):
    """Every graph takes `us` per launch; every look at the wall clock takes `tick_s`."""

    def __init__(self, us: float = 10.0, tick_s: float = 0.0, free_bytes: int = 1 << 40) -> None:
        self.device = torch.device("cpu")
        self.us, self.tick_s, self.free = us, tick_s, free_bytes
        self.seconds = 0.0
        self.events: list[str] = []
        self.script: list[float] = []

    def now_s(self) -> float:
        self.seconds += self.tick_s
        return self.seconds

    def wait(self) -> None:
        self.events.append("wait")

    def capture(self, work: Sequence[Callable]) -> Callable:
        def replay() -> int:
            for one in work:
                one()
            return len(work)

        return replay

    def flush(self) -> None:
        self.events.append("flush")

    def elapsed_us(self, work: Callable) -> float:
        launches = work()
        self.events.append("time")
        if self.script:
            return self.script.pop(0)
        return self.us * (launches if isinstance(launches, int) else 1)

    def do_bench_us(self, work: Callable, rep_ms: float) -> float:
        work()
        return 1.25 * self.us

    def free_bytes(self) -> int:
        return self.free

    def release(self) -> None:
        self.events.append("release")
