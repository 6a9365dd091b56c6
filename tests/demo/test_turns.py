import threading

import pytest

from duotone.demo import turns as module
from duotone.demo.turns import Turns


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock[0] += ...` moves."""
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def run(turns, steps, clock, costs):
    """Threads that take so many steps at these costs; returns the order of all steps."""
    order = []

    def lane(index):
        with turns.lane(index):
            for _ in range(steps[index]):
                clock[0] += costs[index]
                order.append(index)
                with turns.paused(index):
                    clock[0] += 100

    # The second thread begins first, and still waits for the first.
    threads = [threading.Thread(target=lane, args=(index,)) for index in reversed(range(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    return order


def test_the_lane_that_has_used_less_time_goes_next(clock):
    turns = Turns(2)
    order = run(turns, (6, 2), clock, costs=(1.0, 3.0))
    assert order == [0, 1, 0, 0, 0, 1, 0, 0]


def test_time_is_a_lanes_own_without_pauses_and_waits(clock):
    turns = Turns(2)
    run(turns, (4, 2), clock, costs=(1.0, 3.0))
    assert turns.seconds == [4.0, 6.0]


def test_a_lane_that_raises_does_not_hold_the_other_up(clock):
    turns = Turns(2)

    def failing():
        with pytest.raises(RuntimeError), turns.lane(0):
            raise RuntimeError

    thread = threading.Thread(target=failing)
    thread.start()
    with turns.lane(1):
        clock[0] += 2.0
    thread.join(10)
    assert turns.seconds == [0.0, 2.0]


def test_an_error_inside_a_pause_ends_the_lane(clock):
    turns = Turns(2)
    with pytest.raises(RuntimeError), turns.lane(0), turns.paused(0):
        raise RuntimeError
    with turns.lane(1):
        pass
