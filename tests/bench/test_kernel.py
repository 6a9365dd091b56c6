"""The run from settings to a result, on a CPU with time made up."""

import json
from dataclasses import replace

import pytest
import torch

from duotone.bench import kernel
from duotone.bench.baselines import BASELINES, Baseline, UnavailableError
from duotone.bench.kernel import Settings, decode_rows, failures, run_kernels, table_rows
from duotone.bench.row_bench import RowBench, WrongResultError, compare, reference
from duotone.bench.rows import DenseRow, PackedRow
from duotone.bench.schemes import select
from duotone.bench.shapes import Shape
from duotone.bench.speedups import with_speedups
from duotone.bench.timing import Deadline
from duotone.quant import TensorSpec

from fake_clock import FakeClock

SHAPE = Shape(1, 4, 2, 160, 64)
BY_NAME = {baseline.name: baseline for baseline in BASELINES}


@pytest.fixture(autouse=True, scope="module")
def few_buffers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duotone.bench.timing.MIN_ROTATED", 2)
        patch.setattr("duotone.bench.timing.ROTATED_BYTES", 1)
        patch.setattr(kernel, "copy_tb_per_s", lambda clock: 4.0)
        yield


def settings(**changes):
    base = Settings(shapes=[SHAPE], schemes=select(["2 bit, tau", "kivi-2"]), impls=["reference"])
    return replace(base, **changes)


def rows_by_name(rows):
    return {(row["row"], row["impl"]): row for row in rows}


@pytest.fixture(scope="module")
def result():
    told = []
    made = run_kernels(settings(impls=["cuda", "reference"]), FakeClock(), told_to(told))
    assert told[-1] == ("done", len(made["rows"]), len(made["rows"]))
    return made


def told_to(told):
    return lambda what, done, total: told.append((what, done, total))


def test_a_result_says_where_it_comes_from_and_is_json(result):
    assert result["schema"] == "duotone.kernels/1"
    assert {"created", "commit", "versions", "device", "method", "repeats"} <= set(result)
    assert json.loads(json.dumps(result)) == result
    assert [s["name"] for s in result["schemes"]] == ["2 bit, tau", "kivi-2"]
    assert TensorSpec.from_dict(result["schemes"][1]["value"]) == TensorSpec(2, "channels", 32)


def test_every_row_has_numbers_or_a_reason(result):
    rows = rows_by_name(result["rows"])
    assert len(rows) == len(result["rows"]) == len(BASELINES) + 4
    ours = rows["2 bit, tau", "reference"]
    assert ours["status"] == "ok"
    assert (ours["kind"], ours["nominal_bits"], ours["tau"]) == ("packed", 2, True)
    assert ours["us"] == {"do_bench": 12.5, "clean": 10.0, "rotated": 10.0}
    used = 1 * 2 * 2 * (160 * 16 + 2 * 64 * 2)
    assert ours["bytes"]["total"] == used
    assert ours["tb_per_s"]["clean"] == pytest.approx(used / 10 / 1e6)
    assert ours["share_of_copy"]["rotated"] == pytest.approx(used / 10 / 1e6 / 4)
    assert ours["speedup"] == {"do_bench": 1, "clean": 1, "rotated": 1}
    assert ours["best"]["clean"] in BY_NAME
    assert ours["check"]["rms"] < 2e-3
    if not torch.cuda.is_available():
        assert "CUDA device" in rows["2 bit, tau", "cuda"]["reason"]
        assert "CUDA device" in rows["kivi-2", "cuda"]["reason"]
    assert rows["two matmuls", None]["kind"] == "16-bit"
    assert all(row["status"] == "ok" or row["reason"] for row in rows.values())
    assert failures(result) == []


def test_stages_are_measured_in_turn_and_listed_in_the_tables_order():
    clock, told = FakeClock(), []
    two = settings(shapes=[SHAPE, replace(SHAPE, tokens=99)], impls=["reference", "cuda"])
    rows = decode_rows(two, clock, Deadline(clock, None), told_to(told))
    names = [row["row"] for row in rows if row["shape"]["tokens"] == 99]
    own = [name for name in ("2 bit, tau", "kivi-2") for _ in two.impls]
    assert names == [*BY_NAME, *own]
    late = {name for name, baseline in BY_NAME.items() if baseline.compiled}
    measured = [what.split(": ")[1] for what, *_ in told[:-1]]
    # All shapes' quick rows, what compiles for long, and the reference's rows at last.
    assert set(measured[-4:]) == {"2 bit, tau", "kivi-2"}
    assert set(measured[-4 - 2 * len(late) : -4]) == late
    assert late.isdisjoint(measured[: -4 - 2 * len(late)])


def test_quick_is_one_shape_without_slow_starters():
    clock = FakeClock()
    quick = settings(shapes=[SHAPE, SHAPE]).quick()
    rows = decode_rows(quick, clock, Deadline(clock, None), lambda *_: None)
    late = {name for name, baseline in BY_NAME.items() if baseline.compiled}
    assert [row["row"] for row in rows] == [
        *(name for name in BY_NAME if name not in late),
        "2 bit, tau",
        "kivi-2",
    ]


def test_rows_after_the_time_is_over_say_so():
    clock = FakeClock(tick_s=30)
    rows = decode_rows(settings(), clock, Deadline(clock, 1), lambda *_: None)
    assert rows[-1]["status"] == "skipped"
    assert "--minutes" in rows[-1]["reason"]


def broken(raising):
    def prepare(query, key, value, sm_scale):
        def run():
            raise raising

        return run

    return Baseline("broken", prepare)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (UnavailableError("not here"), "unavailable", "not here"),
        (RuntimeError("declined\nat length"), "unavailable", "declined"),
        (torch.OutOfMemoryError("17 GB"), "failed", "out of memory: 17 GB"),
        (KeyError("x"), "failed", "KeyError: 'x'"),
    ],
    ids=["unavailable", "declined", "memory", "bug"],
)
def test_a_row_that_fails_ends_nothing(error, status, reason, monkeypatch):
    monkeypatch.setattr(kernel, "BASELINES", (broken(error), BY_NAME["two matmuls"]))
    made = run_kernels(settings(), FakeClock())
    first, second, *ours = made["rows"]
    assert (first["status"], first["reason"]) == (status, reason)
    assert all(row["status"] == "ok" for row in [second, *ours])
    assert len(failures(made)) == (status == "failed")


def test_a_wrong_row_is_not_timed_and_fails_loudly(monkeypatch):
    wrong = Baseline("wrong", lambda query, key, value, sm_scale: lambda: query * 0.9)
    monkeypatch.setattr(kernel, "BASELINES", (wrong,))
    made = run_kernels(settings(), FakeClock())
    row = made["rows"][0]
    assert row["status"] == "wrong"
    assert "us" not in row
    assert "relative RMS" in failures(made)[0]
    # No 16-bit row is left to compare with.
    assert made["rows"][1]["speedup"]["clean"] is None


def test_our_own_errors_are_failures_not_absences(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr("duotone.bench.rows.decode_attention", fail)
    made = run_kernels(settings(), FakeClock())
    row = rows_by_name(made["rows"])["kivi-2", "reference"]
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: illegal memory access")


@pytest.mark.parametrize(
    ("table", "rows", "title"),
    [("pack", "packing_rows", "packing"), ("step", "step_rows", "steps on pages")],
)
def test_other_tables_that_fail_leave_the_rest(table, rows, title, monkeypatch):
    def fail(*args):
        raise ValueError("do not trust")

    monkeypatch.setattr(kernel, rows, fail)
    made = run_kernels(settings(tables=["decode", table]), FakeClock())
    assert rows_by_name(made["rows"])["kivi-2", "reference"]["status"] == "ok"
    assert failures(made) == [f"{title}: ValueError: do not trust"]


def test_a_shape_is_checked_once_per_head_dim_and_group():
    bench, row = RowBench(FakeClock(tick_s=1), 5), table_rows(select(["1 bit"]), ["reference"])[-1]
    seconds, errors = bench.check(SHAPE, row)
    assert seconds > 0
    assert bench.check(replace(SHAPE, tokens=999), row) == (0.0, errors)
    assert bench.check(replace(SHAPE, q_heads=2), row)[0] > 0


def test_compare_is_strict():
    expected = torch.ones(4, 4)
    assert compare(expected.clone(), expected, (1e-3, 1e-3)) == {"rms": 0, "max": 0}
    for out in (expected * 1.01, expected[:2], expected * torch.nan):
        with pytest.raises(WrongResultError):
            compare(out, expected, (1e-3, 1e-3))


@pytest.mark.parametrize("name", ["sdpa flash, heads as rows", "two matmuls"])
def test_heads_as_rows_are_the_same_attention(name):
    row = DenseRow(BY_NAME[name])
    problem = row.problem(Shape(2, 12, 3, 50, 64), torch.device("cpu"))
    compare(row.call(problem)().reshape(problem.query.shape), reference(problem), row.tolerance)
    assert row.nbytes(problem).total == 2 * 2 * 3 * 50 * 64 * 2


def test_flex_says_that_it_needs_a_gpu():
    row = DenseRow(BY_NAME["flex, compiled"])
    with pytest.raises(UnavailableError, match="CUDA devices only"):
        row.call(row.problem(SHAPE, torch.device("cpu")))


def test_triton_is_right_here_too(monkeypatch):
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        # Its interpreter cuts bf16 off instead of rounding.
        monkeypatch.setattr("duotone.bench.problems.DTYPE", torch.float16)
    schemes = select(["1 bit, tau", "duotone-whole", "xquant shared 2/1", "innerq-2, windows 128"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for row in (PackedRow(scheme, "triton") for scheme in schemes):
        problem = row.problem(Shape(1, 4, 2, 200, 64), device)
        compare(row.call(problem)(), reference(problem), row.tolerance)


def timed(name, us, kind="packed", **shape):
    return {
        "row": name,
        "kind": kind,
        "shape": {"n": 1} | shape,
        "status": "ok",
        "us": dict(zip(("do_bench", "clean", "rotated"), us, strict=True)),
        "bytes": {"total": 40_000_000},
    }


def test_speedups_are_over_the_best_16_bit_row_of_shape_and_method():
    rows = [
        timed("a", (100.0, 90.0, None), "16-bit"),
        timed("b", (90.0, 100.0, 80.0), "16-bit"),
        timed("elsewhere", (2.0, 2.0, 2.0), "16-bit", n=2),
        {"row": "c", "kind": "16-bit", "shape": {"n": 1}, "status": "skipped", "reason": "x"},
        timed("ours", (10.0, 10.0, 10.0)),
    ]
    done = {row["row"]: row for row in with_speedups(rows, 4.0)}
    assert done["ours"]["speedup"] == {"do_bench": 9, "clean": 9, "rotated": 8}
    assert done["ours"]["best"] == {"do_bench": "b", "clean": "a", "rotated": "b"}
    assert done["ours"]["tb_per_s"]["clean"] == pytest.approx(4)
    assert done["ours"]["share_of_copy"]["clean"] == pytest.approx(1)
    assert done["a"]["speedup"]["rotated"] is None
    assert done["c"] == rows[3]
