"""Rows of the linear benchmark and of tuning, interpreted at tiny sizes, with times made up."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from benchmarks.mquant import cases, speed, tune
from duotone.weights.kernels.triton.gemm import GemmConfig
from duotone.weights.kernels.triton.gemv import GemvConfig
from duotone.weights.kernels.triton.hadamard import HadamardConfig
from duotone.weights.kernels.triton.split import SplitConfig

from fake_clock import FakeClock

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
SLOW = pytest.mark.slow


def clock() -> FakeClock:
    """Every launch takes 10 us, and there is no memory for copies."""
    return FakeClock(us=10.0, free_bytes=0)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = {
        "qkv": (192, 128, "norm"),
        "o": (128, 128, "plain"),
        "gate_up": (512, 128, "norm"),
        "down": (128, 256, "gate"),
    }
    monkeypatch.setattr(cases, "LINEARS", linears)
    monkeypatch.setattr(speed, "REPEATS", 1)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("down", 1),
        pytest.param("qkv", 1, marks=SLOW),
        pytest.param("qkv", 34, marks=SLOW),
        pytest.param("down", 34, marks=SLOW),
    ],
)
def test_rows_run(name: str, tokens: int) -> None:
    row = speed.linear_row(name, tokens, clock())
    assert set(row["us"]) == set(speed.rows_of(tokens))
    assert set(row["us"].values()) == {10.0}
    assert "bf16" in speed.shown(row)


def test_both_ways_of_a_hadamard_have_their_turn() -> None:
    trials = list(tune.hadamard_trials())
    ways = {(t.linear, t.tokens): set() for t in trials}
    for trial in trials:
        ways[trial.linear, trial.tokens].add(trial.config.few_units > 0)
    assert all(ways[name, 64] == {True, False} for name in ("down", "fc2"))


@pytest.mark.parametrize("few_units", [0, 3])
@pytest.mark.parametrize("name", ["down", "fc2"])
def test_tuning_tries_hadamards(name: str, few_units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "LINEARS", {"down": (64, 320, "gate")})
    monkeypatch.setattr(cases, "FC2", {"fc2": (64, 192, "quick_gelu")})
    row = tune.tried(tune.Trial("hadamard", name, 3, HadamardConfig(few_units)), {}, clock())
    assert row["us"] == 10.0
    assert row["max_error"] <= 1


def test_tiles_fit_shared_memory() -> None:
    for trial in (*tune.gemm_trials(), *tune.split_trials()):
        stage_bytes = (trial.config.tokens + trial.config.outs) * trial.config.ins
        programs = trial.config.per_sm if isinstance(trial.config, GemmConfig) else 1
        assert programs * trial.config.stages * stage_bytes <= 227 * 1024, trial


def test_chosen_families_are_tried_once_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trials = [tune.Trial("w4a8 gemv", "o", 1, GemvConfig(outs, 16, 1)) for outs in (3, 4, 4)]
    families = {"few": lambda: iter(trials), "gemv": tune.gemv_trials}
    monkeypatch.setattr(tune, "FAMILIES", families)
    tune.run(60, tmp_path, clock(), ["few"])
    written = json.loads((tmp_path / "tune.json").read_text())
    assert [("failed" in row) for row in written["rows"]] == [True, False]
    assert written["best"] == {"w4a8 gemv o 1": written["rows"][1]}


@SLOW
@pytest.mark.parametrize(
    "trial",
    [
        tune.Trial("w4a8 gemv", "down", 1, GemvConfig(4, 16, 1)),
        tune.Trial("w8a8", "qkv", 32, GemmConfig(32, 32, 32)),
        tune.Trial("w8a8", "o", 5, GemmConfig(32, 32, 32, per_sm=9, parts=2)),
        tune.Trial("w8a8 split", "o", 16, SplitConfig(32, 16, 64, 2)),
        tune.Trial("w4a8 g128 gemv", "down", 1, GemvConfig(32, 32, 1)),
        tune.Trial("w4a8 g128 scratch", "down", 32, GemmConfig(32, 32, 128)),
        tune.Trial("w4a8 g128 split", "o", 16, SplitConfig(32, 16, 128, 2)),
        tune.Trial("w4a16 split", "o", 16, SplitConfig(32, 16, 128, 2)),
    ],
    ids=lambda trial: f"{trial.kind} {trial.tokens}",
)
def test_tuning_tries_and_compares(trial: tune.Trial) -> None:
    row = tune.tried(trial, {}, clock())
    assert row["us"] == 10.0
    # the interpreter truncates to bfloat16 where torch and the GPU round
    assert row["max_error"] < 0.05
