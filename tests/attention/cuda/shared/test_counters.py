"""Launches that may run at the same time take different zeros."""

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import torch

from duotone.attention.cuda.shared import counters

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list whose only element says if the stream is captured. There are no counters yet."""
    state = [False]
    monkeypatch.setattr(counters, "_COUNTERS", {})
    monkeypatch.setattr(counters, "COUNTERS", 1000)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return state


def places(of: list[int]) -> list[int]:
    """Numbers of the zeros at addresses."""
    start = counters._COUNTERS[CPU].zeros.data_ptr()
    return [(address - start) // 4 for address in of]


def take(*counts: int) -> list[int]:
    return [counters.counters(CPU, count)[0] for count in counts]


def test_a_ring_begins_anew_where_its_end_has_no_room() -> None:
    assert places(take(400, 600, 10, 991)) == [0, 400, 0, 0]


def test_a_graph_keeps_zeros_that_no_other_launch_gets(captured: list[bool]) -> None:
    own = take(400)
    captured[0] = True
    kept = take(400, 500)
    captured[0] = False
    assert places(kept) == [1000, 1400]
    assert places(own + take(600, 400)) == [0, 400, 0]


def test_a_capture_before_any_launch_has_zeros_of_its_own(captured: list[bool]) -> None:
    captured[0] = True
    assert not counters.counters(CPU, 5)[1].any()
    assert not counters._COUNTERS


class Slow(int):
    """A count whose sum takes so long that other threads run meanwhile."""

    def __radd__(self, other: int) -> int:
        sleep(0.01)
        return other + int(self)


def test_threads_take_different_zeros() -> None:
    with ThreadPoolExecutor(2) as threads:
        taken = threads.map(take, [Slow(1)] * 2)
    assert sorted(places([address for (address,) in taken])) == [0, 1]
