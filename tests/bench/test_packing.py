"""The packing table: kernels' own source on a CPU, time made up."""

import pytest
import torch

from duotone.attention.cuda.classes import pack as class_pack
from duotone.attention.cuda.classes.layout import class_layout
from duotone.attention.cuda.groups import pack as group_pack
from duotone.attention.cuda.spans import pack as span_pack
from duotone.bench import packing
from duotone.bench.packing import PACKINGS, Packing, check, packing_rows
from duotone.bench.shapes import Shape
from duotone.bench.timing import METHODS, Deadline
from duotone.cache.pair import PackedPair

from cuda_on_cpu import missing, run_on_cpu
from fake_clock import FakeClock

CPU = torch.device("cpu")
SHAPE = Shape(1, 2, 1, 128, 32)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(packing, "CHECKED", SHAPE)
    monkeypatch.setattr("duotone.bench.timing.MIN_ROTATED", 2)
    monkeypatch.setattr("duotone.bench.timing.ROTATED_BYTES", 1)


def classes_by_torch(key, value, spec, piece):
    return PackedPair.pack(key, value, spec, piece).laid_out(class_layout)


@pytest.fixture
def by_torch(monkeypatch):
    monkeypatch.setattr(packing, "class_pack", classes_by_torch)
    monkeypatch.setattr(
        Packing, "call", lambda row, key, value, piece: lambda: row.expected(key, value)
    )


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("row", PACKINGS, ids=lambda row: row.name)
def test_rows_are_what_torch_writes(row, monkeypatch, tmp_path):
    torch.manual_seed(0)
    for module in (class_pack, group_pack, span_pack):
        run_on_cpu(module, monkeypatch, tmp_path)
    check(row, CPU)


@pytest.mark.parametrize("row", PACKINGS, ids=lambda row: row.name)
def test_a_wrong_row_is_never_timed(row, monkeypatch, by_torch):
    check(row, CPU)
    monkeypatch.setattr(
        Packing, "call", lambda row, key, value, piece: lambda: row.expected(key, value) ^ 1
    )
    with pytest.raises(ValueError, match="do not trust"):
        check(row, CPU)


def test_every_row_is_compared_with_the_copy(by_torch):
    clock = FakeClock()
    table = packing_rows(clock, Deadline(clock, None), 5, lambda *_: None, [SHAPE])
    copy, *others = table["rows"]
    assert table["stopped"] is None
    assert (copy["row"], copy["read_bytes"]) == ("copy", 2 * 128 * 32 * 2)
    eager = [row for row in others if "," in row["row"] and row["us"]["rotated"] is None]
    captured = [row for row in others if row not in eager]
    assert [row["row"] for row in captured] == [
        name for row in PACKINGS for name in (row.name, *[f"{row.name}, with levels"] * row.classes)
    ]
    assert all(row["over_copy"] == dict.fromkeys(METHODS, 1.0) for row in [copy, *captured])
    assert [row["row"] for row in eager] == [
        f"{name}, {how}"
        for name in ("transform coded, 1 bit", "duotone-whole")
        for how in ("by torch",)
    ]
    only_clean = dict.fromkeys(METHODS) | {"clean": 1.0}
    assert all(row["over_copy"] == only_clean for row in eager)
    sizes = {row["row"]: row["written_bytes"] for row in others}
    assert sizes["kivi-2"] == 128 * 32 // 2 + 2 * 128 * 32 // 32 * 4


def test_a_deadline_is_kept(by_torch):
    clock = FakeClock(tick_s=40.0)
    table = packing_rows(clock, Deadline(clock, 1), 5, lambda *_: None, [SHAPE] * 3)
    assert "time was over" in table["stopped"]
    assert len(table["rows"]) < 3 * (1 + len(PACKINGS))
