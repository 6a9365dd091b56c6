"""The table of steps on pages: plain torch on a CPU, time made up."""

import pytest
import torch

from duotone.bench import paged_steps
from duotone.bench.paged_steps import PagedStep, check, step_rows
from duotone.bench.shapes import Shape
from duotone.bench.timing import Deadline
from duotone.report.kernels import step_table
from duotone.serve.pages import PageLayout, append_tokens

from fake_clock import FakeClock

STAMP = {"device": "H100", "versions": {}, "commit": "0" * 40, "created": "2026-11-25T00:00:00"}
LAYOUT, SHAPE = PageLayout(2, 64, torch.bfloat16), Shape(3, 4, 2, 64, 64)


@pytest.fixture(autouse=True)
def by_torch(monkeypatch):
    def append(step, pool):
        where = step.step.numbers
        where = (where.rings, where.full, where.position)
        append_tokens(step.key, step.value, pool, *where, step.layout)
        return pool

    monkeypatch.setattr(PagedStep, "append", append)
    monkeypatch.setattr(PagedStep, "attend", lambda step, pool: step.expected(pool)[1])
    monkeypatch.setattr(paged_steps, "CHECKED", SHAPE)
    monkeypatch.setattr(paged_steps, "DRAWN_PAGES", 4)
    monkeypatch.setattr("duotone.bench.timing.MIN_ROTATED", 2)
    monkeypatch.setattr("duotone.bench.timing.ROTATED_BYTES", 1)


def test_rows_are_timed_with_the_bytes_that_they_move(monkeypatch):
    monkeypatch.setattr(paged_steps, "check", lambda *_: None)
    monkeypatch.setattr(PagedStep, "attend", lambda step, pool: step.out)
    table = step_rows(FakeClock(), Deadline(FakeClock(), None), 2, lambda *_: None, [SHAPE])
    two = {row["row"]: row for row in table["rows"] if row["row"].startswith("2 bit")}
    assert len(table["rows"]) == 2 * len(two) == 10
    # Rows of K and V of 3 tokens; 3 pages of 64 tokens, read and written; 64 packed tokens each.
    assert two["2 bit, append"]["bytes"] == 2 * 3 * 256
    assert two["2 bit, append, all pack"]["bytes"] == 2 * 3 * (256 + 64 * 256 + 64 * 48)
    assert two["2 bit, attend"]["bytes"] == 2 * (3 * 64 * 48 + (1 + 22 + 43) * 256)
    rendered = step_table([{"step": table, "copy_tb_per_s": 3, "repeats": 5} | STAMP])
    assert "| 3, 2, 64 | 2 bit, append, all pack | 10.0 | 0.1 | 0.01 |" in rendered
    assert step_table([{"step": None}]) == "Steps on pages were not measured."


@pytest.mark.parametrize("name", ["append", "attend"])
def test_a_wrong_row_is_never_timed(name, monkeypatch):
    check(LAYOUT, torch.device("cpu"))
    right = getattr(PagedStep, name)
    monkeypatch.setattr(PagedStep, name, lambda step, pool: right(step, pool) * 2)
    with pytest.raises(ValueError, match="do not trust"):
        check(LAYOUT, torch.device("cpu"))


def test_a_deadline_is_kept(monkeypatch):
    monkeypatch.setattr(paged_steps, "_shape_rows", lambda *_: [])
    clock = FakeClock(tick_s=40.0)
    table = step_rows(clock, Deadline(clock, 1), 5, lambda *_: None, [SHAPE] * 3)
    assert "time was over" in table["stopped"]
