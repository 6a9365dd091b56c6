"""The benchmark's rows in the interpreter, at tiny sizes, under a clock that invents times."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

import mquant_speed

from duotone.weights.kernels.triton.hadamard import HadamardConfig

import mquant_cases
import mquant_tune
import mquant_tune_batch
import mquant_tune_hadamard

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


class Clock:
    """Runs everything, and says that each launch took 10 us."""

    device = torch.device("cpu")

    def capture(self, work):
        def replay():
            for one in work:
                one()

        return replay

    def elapsed_us(self, work) -> float:
        work()
        return 10.0

    def free_bytes(self) -> int:
        return 0

    def release(self) -> None:
        pass


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = {
        "qkv": (192, 128, "norm"),
        "o": (128, 128, "plain"),
        "gate_up": (512, 128, "norm"),
        "down": (128, 256, "gate"),
    }
    monkeypatch.setattr(mquant_cases, "LINEARS", linears)
    monkeypatch.setattr(mquant_speed, "REPEATS", 1)


SLOW = pytest.mark.slow


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
    row = mquant_speed.linear_row(name, tokens, Clock())
    assert set(row["us"]) == set(mquant_speed.rows_of(name, tokens))
    copies = 1 if tokens == 1 else mquant_speed.PREFILL_COPIES
    assert set(row["us"].values()) == {10.0 / copies}
    assert "bf16" in mquant_speed.shown(row)


def test_every_family_of_groups_has_its_turn() -> None:
    kinds = [trial.kind for trial in mquant_tune.grouped_trials()]
    assert set(kinds) == set(kinds[:3])
    assert len(set(kinds)) == 3


def test_both_ways_of_a_hadamard_have_their_turn() -> None:
    trials = list(mquant_tune.hadamard_trials())
    ways = {(t.linear, t.tokens): set() for t in trials}
    for trial in trials:
        ways[trial.linear, trial.tokens].add(trial.config.few_units > 0)
    assert all(ways[name, 64] == {True, False} for name in ("down", "fc2"))


@pytest.mark.parametrize("few_units", [0, 3])
@pytest.mark.parametrize("name", ["down", "fc2"])
def test_tuning_tries_hadamards(name: str, few_units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linears = {"down": (64, 320, "gate")}
    monkeypatch.setattr(mquant_cases, "LINEARS", linears)
    monkeypatch.setattr(mquant_cases, "FC2", {"fc2": (64, 192, "quick_gelu")})
    config = HadamardConfig(few_units)
    row = mquant_tune.tried(
        mquant_tune.Trial(mquant_tune_hadamard.KIND, name, 3, config), {}, Clock()
    )
    # two copies of the input
    assert row["us"] == 5.0
    assert row["max_error"] <= 1


def test_batches_try_every_shape_and_fit_shared_memory() -> None:
    trials = list(mquant_tune.batch_trials())
    assert len(set(trials)) == len(trials)
    shapes = mquant_tune_batch.SHAPES
    assert [(t.kind, t.linear, t.tokens) for t in trials[: len(shapes)]] == [
        ("bf16", *shape) for shape in shapes
    ]
    for trial in trials:
        config = trial.config
        if config is None:
            continue
        stage_bytes = (config.tokens + config.outs) * config.ins
        programs = config.per_sm if trial.kind == "w8a8" else 1
        assert programs * config.stages * stage_bytes <= 227 * 1024, trial
    kinds = {t.kind for t in trials if t.tokens == 467}
    assert kinds == {"bf16", "int_mm", "w8a8"}


def test_chosen_families_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trials = [mquant_tune.Trial("bf16", "qkv", 3, None), mquant_tune.Trial("int_mm", "o", 19, None)]
    families = {"batch": (lambda: iter(trials), 1.0), "gemv": (mquant_tune.gemv_trials, 1.0)}
    monkeypatch.setattr(mquant_tune, "FAMILIES", families)
    mquant_tune.run(60, tmp_path, Clock(), ["batch"])
    written = json.loads((tmp_path / "tune.json").read_text())
    assert set(written["best"]) == {"bf16 qkv 3", "int_mm o 19"}
    assert all(row["max_error"] == 0 for row in written["rows"])


@SLOW
def test_tuning_tries_and_compares() -> None:
    config = mquant_tune.GemvConfig(4, 16, 1)
    for trial in (
        mquant_tune.Trial("w4a8 gemv", "down", 1, config),
        mquant_tune.Trial("w8a8", "qkv", 32, mquant_tune.GemmConfig(32, 32, 32)),
        mquant_tune.Trial("w8a8", "o", 5, mquant_tune.GemmConfig(32, 32, 32, per_sm=9, parts=2)),
        mquant_tune.Trial("w8a8 split", "o", 16, mquant_tune.SplitConfig(32, 16, 64, 2)),
        mquant_tune.Trial("w4a8 g128 gemv", "down", 1, mquant_tune.GemvConfig(32, 32, 1)),
        mquant_tune.Trial("w4a8 g128 scratch", "down", 32, mquant_tune.GemmConfig(32, 32, 128)),
        mquant_tune.Trial("w4a8 g128 split", "o", 16, mquant_tune.SplitConfig(32, 16, 128, 2)),
    ):
        row = mquant_tune.tried(trial, {}, Clock())
        assert row["us"] == 10.0
        # the interpreter truncates to bfloat16 where torch and the GPU round
        assert row["max_error"] < 0.05
    wrong = mquant_tune.Trial("w4a8 gemv", "down", 1, mquant_tune.GemvConfig(3, 16, 1))
    assert "failed" in mquant_tune.tried(wrong, {}, Clock())
