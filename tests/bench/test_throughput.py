"""The throughput experiment on a CPU: a tiny model, tiny budgets, the same code without graphs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from merge_throughput import merge
from transformers import LlamaConfig, QuantizedCache
from typer.testing import CliRunner

from duotone.bench import throughput
from duotone.bench.budget import attempt, check_budget, largest_batch
from duotone.bench.library_cache import LibraryCache, kept_bytes
from duotone.bench.throughput import Bench, Configuration, run
from duotone.bench.throughput_rows import ROWS, Row
from duotone.cli import bench_throughput
from duotone.planning.capacity import predict, predict_again
from duotone.planning.shapes import SHAPES, Load
from duotone.planning.step_time import WEIGHT_BITS, Machine
from duotone.report import tables as report
from duotone.report.files import read_file
from duotone.report.papers import CALIBQUANT, tokens_per_s

from tiny_decoder import CPU, LOAD, SPECS, TINY


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection per attempt takes a second in a process that has loaded everything."""
    monkeypatch.setattr("duotone.bench.budget.gc.collect", lambda: 0)


def test_largest_batch_is_found_from_any_guess() -> None:
    def fits(batch: int) -> dict:
        check_budget(CPU, batch, 37)
        return {"batch": batch}

    for guess in (0, 1, 30, 36, 37, 38, 45, 90):
        assert largest_batch(fits, guess)[0] == pytest.approx(37, abs=2 * (guess > 80))
    assert largest_batch(fits, 37) == (37, {"batch": 37})
    assert largest_batch(fits, 38) == (37, {"batch": 37})

    def never(batch: int) -> dict:
        raise torch.OutOfMemoryError

    assert largest_batch(never, 3) is None

    def broken(batch: int) -> dict:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        attempt(broken, 3)

    def ended_in_a_capture(batch: int) -> dict:
        try:
            raise torch.OutOfMemoryError
        finally:
            raise RuntimeError("capture was invalidated")

    assert attempt(ended_in_a_capture, 3) is None


def has_fp8() -> bool:
    """Whether transformers has a quantized cache that needs no library; 5.17 has none."""
    try:
        QuantizedCache("fp8", LlamaConfig(num_hidden_layers=1))
    except ValueError:
        return False
    return True


needs_fp8 = pytest.mark.skipif(not has_fp8(), reason="transformers without the fp8 cache")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    # What these stand for is not there in a toy.
    monkeypatch.setattr("duotone.planning.capacity.WORKSPACE_BYTES", 0)
    monkeypatch.setattr("duotone.planning.capacity.FLUSH_COPIES", 10)
    rows = {
        "16-bit": Row(),
        "mixed": Row(SPECS["mixed"]),
        "whole": Row(SPECS["mixed"], "w8a8"),
        "dense": Row(SPECS["dense containers"]),  # before the one above: weights change once
    }
    monkeypatch.setattr(throughput, "ROWS", rows)


@pytest.mark.usefixtures("short")
def test_measures_and_resumes(tmp_path: Path) -> None:
    bench = Bench(TINY, CPU, LOAD.tokens, Machine())
    wanted = [Configuration(row, 70, 2_000_000, 20, 40) for row in throughput.ROWS]
    found = {at.row: (at, result) for at, result in run(bench, wanted, tmp_path)}
    assert list(found) == ["16-bit", "mixed", "dense", "whole"]
    results = [result for _, result in found.values()]
    assert [result["weights"] for result in results] == ["bf16", "bf16", "bf16", "w8a8"]
    assert results[3]["weight_bytes"] < 0.8 * results[0]["weight_bytes"]
    for at, result in found.values():
        assert json.loads(json.dumps(result)) == json.loads(at.path(tmp_path, "tiny").read_text())
        assert result["batch"] == result["predicted"]["max_batch"]
        needed = result["cache_bytes"] + result["predicted"]["activation_bytes"]
        assert needed <= 2_000_000 < needed * (result["batch"] + 2) / result["batch"]
        assert result["decode_tokens_per_s"] == pytest.approx(result["batch"] / result["step_s"])
    assert results[1]["batch"] > results[0]["batch"]
    assert [result for _, result in run(bench, wanted, tmp_path)] == [None] * 4
    more = [Configuration("16-bit", 71, 2_000_000, 20, 40)]
    assert list(run(bench, more, tmp_path, minutes=0)) == []


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("slower", "chosen"), [(1.1, 8), (1.3, 6)], ids=["larger", "rounded"])
def test_whole_tiles_where_they_are_faster(monkeypatch, slower: float, chosen: int) -> None:
    """Of a batch of 8 and one of 6, a multiple of 3: the one with more tokens per second."""
    bench = Bench(TINY, CPU, LOAD.tokens, Machine())
    monkeypatch.setattr(throughput, "BATCH_MULTIPLE", 3)
    monkeypatch.setattr(throughput, "largest_batch", lambda run, guess: (8, run(8)))
    times = {"last_step_s": 1.0, "prefill_s_per_sequence": 1.0}
    steps = {8: slower * 4 / 3, 6: 1.2}
    monkeypatch.setattr(bench, "_trial", lambda at, row, size: {**times, "step_s": steps[size]})
    result = bench.measure(Configuration("16-bit", 70, 2_000_000, 20, 40))
    assert (result["largest_batch"], result["batch"]) == (8, chosen)


@pytest.mark.usefixtures("short")
def test_nothing_fits(tmp_path: Path) -> None:
    bench = Bench(TINY, CPU, LOAD.tokens, Machine())
    ((_, result),) = run(bench, [Configuration("16-bit", 70, 1000, 20, 40)], tmp_path)
    assert result["batch"] == 0
    assert "step_s" not in result
    with pytest.raises(ValueError, match="rows are"):
        bench.measure(Configuration("3-bit", 70, 1000))


RESULTS = Path(__file__).parents[2] / "results" / "throughput"
MEASURED = {
    str(Configuration.of(result).path(Path(), path.stem).with_suffix("")): result
    for path in sorted(RESULTS.glob("*.jsonl"))
    for result in read_file(path)
    if "predicted" in result
}


@pytest.mark.parametrize("result", MEASURED.values(), ids=MEASURED)
def test_predictions_hold_where_measured(result: dict) -> None:
    """Today's predictor against the results: batch within 5 % (or one), a step within 20 %."""
    assert prediction_misses(result) == []


def prediction_misses(result: dict) -> list[str]:
    again, misses = predict_again(result), []
    batch = result.get("largest_batch", result["batch"])
    if abs(again.max_batch - batch) > max(1, 0.05 * batch):
        misses.append(f"batch {batch}, predicted {again.max_batch}")
    if batch and abs(again.step_s / result["step_s"] - 1) > 0.2:
        misses.append(f"step {result['step_s']:.4f} s, predicted {again.step_s:.4f} s")
    return misses


@pytest.mark.usefixtures("short")
def test_a_wrong_prediction_shows() -> None:
    bench = Bench(TINY, CPU, LOAD.tokens, Machine())
    result = json.loads(json.dumps(bench.measure(Configuration("16-bit", 70, 2_000_000, 20, 40))))
    given = (TINY, None, Load(70, 20, 40), 2_000_000, Machine(), result["batch"])
    right = {**result, "step_s": predict(*given).step_s}
    assert prediction_misses(right) == []
    assert len(prediction_misses({**right, "step_s": 1.3 * right["step_s"]})) == 1
    assert len(prediction_misses({**right, "largest_batch": 2 * right["batch"]})) >= 1


@pytest.mark.usefixtures("short")
def test_tables(tmp_path: Path) -> None:
    shape = replace(TINY, name="internvl2.5-8b")
    bench = Bench(shape, CPU, LOAD.tokens, Machine())
    wanted = [Configuration(row, 70, 2_000_000, 20, 40) for row in ("16-bit", "mixed")]
    wanted.append(Configuration("16-bit", 70, 1000, 20, 40))
    results = [json.loads(json.dumps(result)) for _, result in run(bench, wanted, tmp_path)]
    for result in results[:2]:  # as if they were the paper's
        result["configuration"] |= {"visual": 3328, "budget_bytes": 30 * 10**9}
    rendered = report.tables(tmp_path)
    text = report.RENDERERS["throughput"][1](results)
    # 14 sequences in 0.128 s.
    assert "| 16-bit |" in text
    assert "| 109 |" in text
    assert f"| {results[0]['decode_tokens_per_s']:,.0f} | 1.0 | 1.0 | 1.0 | 100 % |" in text
    assert text.count("**internvl2.5-8b") == 2
    assert set(rendered) == {"throughput", "throughput-predictions"}
    assert rendered["throughput-predictions"].count("\n") == 3


@pytest.mark.usefixtures("short")
def test_merged_results_are_not_measured_again(tmp_path: Path) -> None:
    bench = Bench(TINY, CPU, LOAD.tokens, Machine())
    wanted = [Configuration(row, 70, 1000, 20, 40) for row in ("16-bit", "mixed")]
    assert len(list(run(bench, wanted[:1], tmp_path / "new"))) == 1
    merge(tmp_path / "new", tmp_path)
    found = dict(run(bench, wanted, tmp_path))
    assert found[wanted[0]] is None
    assert found[wanted[1]]["configuration"]["row"] == "mixed"
    line = (tmp_path / "tiny.jsonl").read_text()
    (tmp_path / "tiny.jsonl").write_text(line.replace("duotone.throughput/1", "other/1"))
    with pytest.raises(ValueError, match=r"schema 'duotone\.throughput/1' .*; got .*other/1"):
        list(run(bench, wanted, tmp_path))


def test_two_results_of_a_line_are_refused() -> None:
    result = next(iter(MEASURED.values()))
    with pytest.raises(ValueError, match=r"got two of '1-bit visual' for internvl2\.5-26b, 3328"):
        report.RENDERERS["throughput"][1]([result, result])


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"internvl2.5-8b": TINY}
    monkeypatch.setattr("duotone.planning.shapes.SHAPES", tiny)
    monkeypatch.setattr("duotone.planning.capacity.WORKSPACE_BYTES", 0)
    app = typer.Typer()
    app.command()(bench_throughput.command)
    given = ["--n", "70", "--new", "40", "--prompt", "20", "--device", "cpu", "--out", tmp_path]
    given += ["--budget", "0.002", "--row", "16-bit", "--row", "1-bit visual", "--json"]
    first = CliRunner().invoke(app, [str(part) for part in given])
    assert first.exit_code == 0, first.output
    rows = json.loads(first.stdout)
    assert [row["configuration"]["row"] for row in rows] == ["16-bit", "1-bit visual"]
    again = CliRunner().invoke(app, [str(part) for part in given])
    assert json.loads(again.stdout) == []
    for wrong in (["--budget", "-5"], ["--row", "3-bit"], ["--model", "70b"], ["--n", "many"]):
        bad = CliRunner().invoke(app, [*map(str, given), *wrong])
        assert bad.exit_code != 0
        assert "got" in bad.output
    plain = CliRunner().invoke(app, [*map(str, given[:-1]), "--n", "60"])
    assert "tokens/s" in plain.output


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row.library is None])
def test_every_row_has_a_prediction(row: str) -> None:
    shape = SHAPES["internvl2.5-8b"]
    given = (shape, ROWS[row].cache, Load(3328, 128, 500), 30 * 10**9)
    made = predict(*given, weights=ROWS[row].weights)
    assert made.max_batch > 50
    assert made.roofline_s < made.step_s


@needs_fp8
@pytest.mark.usefixtures("short")
def test_transformers_cache_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(throughput.ROWS, "transformers", Row(library="fp8"))
    bench = Bench(TINY, CPU, LOAD.tokens, Machine())
    wanted = [Configuration(row, 70, 2_000_000, 20, 40) for row in ("16-bit", "transformers")]
    dense, theirs = [result for _, result in run(bench, wanted, tmp_path)]
    assert dense["batch"] < theirs["batch"]
    assert theirs["attention"].startswith("fp8")
    text = report.RENDERERS["throughput"][1]([json.loads(json.dumps(r)) for r in (dense, theirs)])
    assert "| transformers |" in text
    assert "predicted" not in theirs


@needs_fp8
@torch.inference_mode()
def test_transformers_cache_attends_to_what_it_was_given() -> None:
    cache = LibraryCache(TINY, "fp8", LOAD, 2, CPU, torch.float32)
    tokens = LOAD.visual + LOAD.prompt + LOAD.new // 2
    states = torch.randn(2, 2, TINY.kv_heads, 1, TINY.head_dim)
    query = torch.randn(2, TINY.q_heads, 1, TINY.head_dim)
    before = cache.nbytes
    assert before >= 2 * TINY.layers * 2 * TINY.kv_heads * tokens * TINY.head_dim
    seen = []
    cache._attend = lambda q, key, value, sm_scale: seen.append((key, value)) or q
    cache.attend(1, query, *states, 0.1)
    for held, new in zip(seen[0], states, strict=True):
        assert held.shape[2] == tokens + 2
        torch.testing.assert_close(held[:, :, -1:], new, rtol=0.07, atol=0.07)
    assert cache.nbytes > before
    assert kept_bytes((torch.ones(3), None, (torch.ones(2, dtype=torch.int8),))) == 14
    with pytest.raises(ValueError, match="backends are"):
        LibraryCache(TINY, "gguf", LOAD, 2, CPU, torch.float32)


def test_fewer_bits_of_weights_take_less_time() -> None:
    shape, load = SHAPES["internvl2.5-26b"], Load(3328, 128, 500)
    at = {"spec": ROWS["1-bit visual"].cache, "load": load, "budget_bytes": 30 * 10**9}
    few, many = (
        {w: predict(shape, **at, batch=b, weights=w) for w in WEIGHT_BITS} for b in (8, 500)
    )
    for found in (few, many):
        assert found["bf16"].step_s > found["w8a8"].step_s >= found["w4a8"].step_s
        assert all(p.roofline_s < p.step_s for p in found.values())
    # Few rows wait for weights, many for products, which are of the same integers.
    assert few["w8a8"].roofline_s > 1.5 * few["w4a8"].roofline_s
    assert many["w8a8"].roofline_s == many["w4a8"].roofline_s


def test_the_papers_columns() -> None:
    """Tables 5 and 6 are consistent; 7 and 8 divide another table's batches."""
    for (model, tokens, bits), rows in CALIBQUANT.items():
        for budget, row in rows.items():
            if tokens == 3328:
                assert tokens_per_s(row) == pytest.approx(row[3], rel=0.01)
            else:
                other = CALIBQUANT[model, 3328, bits][budget]
                assert other[0] / row[2] == pytest.approx(row[3], rel=0.02)
