"""The bench on a real GPU: nothing is wrong, and every method gives a time."""

import pytest
import torch

from duotone.attention.cuda.shared.runtime import MIN_CAPABILITY
from duotone.bench import packing
from duotone.bench.kernel import Settings, failures, run_kernels
from duotone.bench.shapes import Shape
from duotone.bench.timing import COPY_BYTES, METHODS, CudaClock, Deadline, copy_tb_per_s, measure

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def clock():
    return CudaClock()


@pytest.mark.parametrize("shape", [Shape(2, 8, 2, 1024), Shape(2, 4, 4, 528, 64)], ids=str)
def test_every_scheme_is_right_and_timed(clock, shape):
    impls = ["cuda", "triton", "reference"]
    settings = Settings(shapes=[shape], impls=impls, repeats=5, slow_starters=False)
    result = run_kernels(settings, clock)
    ours = [row for row in result["rows"] if row["impl"] != "reference"]
    assert [line for line in failures(result) if "(reference)" not in line] == []
    timed = [row for row in ours if row["status"] == "ok"]
    assert {row["row"] for row in timed if row["impl"] == "triton"} >= {"1 bit", "duotone-whole"}
    assert any(row["kind"] == "16-bit" for row in timed)
    if torch.cuda.get_device_capability() >= MIN_CAPABILITY:
        own = {"1 bit", "1 bit, tau", "8 bit", "kivi-2", "innerq-2 hybrid", "xquant shared 2/1"}
        assert {row["row"] for row in timed if row["impl"] == "cuda"} >= own
    for row in timed:
        assert all(row["us"][method] > 0 for method in METHODS)
        assert row["speedup"]["clean"] > 0


def test_times_grow_with_the_bytes(clock):
    small, large = (
        torch.ones(size, dtype=torch.uint8, device="cuda") for size in (32 << 20, 512 << 20)
    )
    times = [measure([x.max, x.max], clock, repeats=10) for x in (small, large)]
    for method in ("do_bench", "clean"):
        assert times[1][method] > 4 * times[0][method]
    # 1 GiB read and written by anything from a laptop's to a data centre's GPU.
    assert 0.05 < copy_tb_per_s(clock, repeats=5, nbytes=COPY_BYTES) < 20


def test_packing(clock):
    shape = Shape(2, 4, 2, 1024)
    table = packing.packing_rows(clock, Deadline(clock, None), 5, lambda *_: None, [shape])
    whole = ("", ", with levels", ", by torch")
    names = [p.name + rest for p in packing.PACKINGS for rest in (whole if p.classes else ("",))]
    assert [row["row"] for row in table["rows"]] == ["copy", *names]
    assert all(row["us"]["clean"] > 0 for row in table["rows"])
