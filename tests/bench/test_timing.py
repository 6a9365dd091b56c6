"""The three methods, with time made up."""

import time

import pytest

from duotone.bench.timing import (
    MAX_ROTATED,
    Clock,
    Deadline,
    clean_us,
    copy_tb_per_s,
    measure,
    rotated_count,
    rotated_us,
)

from fake_clock import FakeClock


def test_clean_flushes_before_each_launch_and_takes_the_median():
    clock = FakeClock()
    clock.script = [9.0, 1.0, 5.0]
    assert clean_us(lambda: None, clock, 3) == 5
    assert clock.events == ["flush", "time"] * 3


def test_rotated_is_per_launch_and_leaves_the_first_replay_out():
    clock = FakeClock()
    clock.script = [1000.0, 80.0, 88.0, 160.0]
    assert rotated_us(lambda: None, 8, clock, 3) == 11
    assert "flush" not in clock.events


def test_measure_runs_every_buffer_and_knows_all_methods():
    ran = []
    work = [lambda i=i: ran.append(i) for i in range(3)]
    times = measure(work, FakeClock(us=20), repeats=2)
    assert times == {"do_bench": 25, "clean": 20, "rotated": 20}
    assert set(ran) == {0, 1, 2}
    assert ran[-3:] == [0, 1, 2]


def test_clean_is_the_faster_of_a_call_and_its_graph():
    for direct, graph in ((9.0, 4.0), (4.0, 9.0)):
        clock = FakeClock()
        clock.script = [direct] * 3 + [graph] * 3
        assert measure([lambda: None], clock, 3)["clean"] == 4


def test_without_room_for_a_second_buffer_nothing_is_rotated():
    assert measure([lambda: None], FakeClock(), repeats=2)["rotated"] is None


@pytest.mark.parametrize(
    ("nbytes", "free", "count"),
    [
        (1 << 30, 1 << 40, 8),  # large buffers: eight of them
        (32 << 20, 1 << 40, 16),  # small ones: until they outgrow L2
        (1, 1 << 40, MAX_ROTATED),
        (10 << 30, 50 << 30, 5),  # 0.8 * 50 / 10 beside the first
        (10 << 30, 1 << 30, 1),
    ],
)
def test_rotated_buffers(nbytes, free, count):
    assert rotated_count(nbytes, free) == count


def test_copy_counts_bytes_read_and_written():
    clock = FakeClock(us=2.0)
    assert copy_tb_per_s(clock, repeats=3, nbytes=1 << 20) == pytest.approx(2 * 2**20 / 2 / 1e6)


def test_a_deadline_passes_with_the_clock():
    clock = FakeClock(tick_s=20)
    deadline = Deadline(clock, 1)
    assert [deadline.passed for _ in range(4)] == [False, False, True, True]
    assert not Deadline(clock, None).passed
    with pytest.raises(ValueError, match="above 0"):
        Deadline(clock, 0)


def test_a_cpu_is_timed_by_its_wall_clock():
    clock, runs = Clock(), []
    replay = clock.capture([lambda: runs.append(1), lambda: time.sleep(0.002)])
    assert clock.elapsed_us(replay) >= 2000
    assert clock.do_bench_us(replay, rep_ms=1) >= 2000
    assert rotated_us(replay, 2, clock, 3) >= 1000
    assert len(runs) == 2 + 1 + 3
