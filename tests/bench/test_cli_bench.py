"""`duotone bench` from the command line, where there is no GPU, and with time made up."""

import json

import pytest
import torch
from cli_runs import error_of, run

from duotone.bench import kernel

from fake_clock import FakeClock

SMALL = ("--shape", "1,4,2,160,64", "--scheme", "2 bit", "--impl", "reference")


REFUSED = {
    "a bad shape": (("--shape", "1,2,3"), "a shape is batch,q_heads,kv_heads,tokens"),
    "an unknown scheme": (("--scheme", "calibquant"), "--scheme must be among"),
    "an unknown implementation": (("--impl", "numpy"), "--impl must be among"),
    "an unknown table": (("--table", "all"), "--table must be among"),
    "an existing file": (("--quick", "--out", __file__), "--out must be a new file"),
    "too few repeats": (("--repeats", "1"), "repeats must be at least"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_work(name):
    arguments, message = REFUSED[name]
    assert message in error_of("bench", "kernel", *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_there_is_one_clear_error():
    assert "needs a CUDA device" in error_of("bench", "kernel", "--quick")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("duotone.bench.timing.CudaClock", FakeClock)
    monkeypatch.setattr("duotone.bench.timing.MIN_ROTATED", 2)
    monkeypatch.setattr("duotone.bench.timing.ROTATED_BYTES", 1)
    monkeypatch.setattr(kernel, "copy_tb_per_s", lambda clock: 4.0)


@pytest.mark.usefixtures("fake")
def test_from_the_command_to_a_file(tmp_path):
    out = tmp_path / "new" / "h200.json"
    result = run("bench", "kernel", *SMALL, "--minutes", "3", "--out", out, "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(out.read_text())
    assert json.loads(result.stdout) == made
    assert made["schema"] == "duotone.kernels/1"
    assert made["minutes"] == 3
    assert [row["status"] for row in made["rows"] if row["impl"] == "reference"] == ["ok"]


@pytest.mark.usefixtures("fake")
def test_a_table_on_the_terminal():
    result = run("bench", "kernel", *SMALL, "--quick")
    assert result.exit_code == 0, result.output
    assert "B 1, heads 4/2, n 160, d 64" in result.stdout
    assert "two matmuls" in result.stdout
    assert "unavailable: sdpa cudnn" in result.stdout


@pytest.mark.usefixtures("fake")
def test_a_wrong_row_makes_the_command_fail(monkeypatch):
    monkeypatch.setattr("duotone.bench.rows.decode_attention", lambda query, *_, **__: query)
    result = run("bench", "kernel", *SMALL, "--quick")
    assert result.exit_code == 1
    assert "2 bit (reference): wrong" in " ".join(result.output.split())
