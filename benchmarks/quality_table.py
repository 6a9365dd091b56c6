"""The first result table: what calibration, shrink, lloyd and gain each buy, on held-out data.

For each embedded task: tau by grid search on the calibration split, then every scheme at 8, 4, 2
and 1 bits on the held-out split, with intervals, paired differences and next-token divergence.
Writes two new files per task into --out: TASK.json (all numbers) and TASK.answers.jsonl.
With --later-question the question is read after the pictures' cache was quantized, as in every turn
but the first: read in one step, an answer of one token never sees the quantized cache.

    python benchmarks/quality_table.py --out results/quality
    python benchmarks/quality_table.py --tasks captions --n 40 --calibration 20 --out /tmp/try

One process per task shares a GPU well, since decoding a small model is bound by launches:

    for t in captions documents sequences; do
      python benchmarks/quality_table.py --tasks $t --minutes 8 --out $OUT & done; wait

Where Java was missing, `--rescore DIR` recomputes all text metrics from the stored answers.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quality_rows import CALIBRATED_BITS, RELEASED_TAU, TAUS, grid_specs, table_specs

from duotone.evaluate import REFERENCE, Evaluation, evaluate
from duotone.loading import Loaded, load
from duotone.report.provenance import stamp, write_new_json
from duotone.tasks import TASKS, Example, Task
from duotone.tasks.metrics import confidence_interval, paired_difference, tokenizer_name

BITS = (8, 4, 2, 1)
GRID_SHARE = 0.4


def log(*words: Any) -> None:
    """A line with the time, at once."""
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def distinct(specs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(specs without repetition, {label: label that ran}): equal specs are evaluated once."""
    first: dict[Any, str] = {}
    ran = {label: first.setdefault(spec, label) for label, spec in specs.items()}
    return {label: specs[label] for label in first.values()}, ran


@dataclass(frozen=True)
class Plan:
    """What to run and within which time."""

    n: int
    calibration: int
    batch_size: int
    kl: bool
    later_question: bool
    minutes: float | None
    workers: int | None
    bits: tuple[int, ...] = BITS
    grid: bool = True
    grid_of: Path | None = None
    rescore_later: bool = False
    impl: str = "auto"

    def stem(self, task: str) -> str:
        """The name of the files of one task."""
        return f"{task}-later" if self.later_question else task

    def settings(self, minutes: float | None) -> dict[str, Any]:
        """Keyword arguments of `evaluate` both parts share."""
        return {
            "batch_size": self.batch_size,
            "later_question": self.later_question,
            "minutes": minutes,
            "workers": self.workers,
            "impl": self.impl,
        }


def run_evaluation(loaded: Loaded, task: Task, specs, samples: int, **settings) -> Evaluation:
    """`evaluate` with a line of progress per batch."""
    return evaluate(
        loaded.model,
        loaded.processor,
        task,
        specs,
        samples,
        model_name=loaded.name,
        progress=lambda done, total: log(task.name, len(specs), "schemes", f"{done}/{total}"),
        **settings,
    )


def best_tau(evaluation: Evaluation, task: Task, prefix: str) -> tuple[int, int]:
    """The pair with the best headline score; ties go to more equal tokens, then to smaller tau."""

    def quality(pair: tuple[int, int]) -> tuple[float, float, int]:
        scores = evaluation.scores[f"{prefix} tau {pair[0]},{pair[1]}"]
        return scores[task.headline].value, scores["same_tokens"].value, -sum(pair)

    return max(((a, b) for a in TAUS for b in TAUS), key=quality)


def search_tau(loaded: Loaded, task: Task, plan: Plan) -> tuple[dict[int, tuple], dict[str, Any]]:
    """(best tau of the paper's ranges by bits, the whole grid) on the calibration split."""
    specs = {label: spec for bits in CALIBRATED_BITS for label, spec in grid_specs(bits).items()}
    minutes = plan.minutes and plan.minutes * GRID_SHARE
    evaluation = run_evaluation(
        loaded, task, specs, plan.calibration, split="calibration", **plan.settings(minutes)
    )
    prefixes = sorted({label.split(" tau ")[0] for label in specs})
    chosen = {prefix: best_tau(evaluation, task, prefix) for prefix in prefixes}
    grid = {label: result["metrics"] for label, result in evaluation.results.items()}
    samples = evaluation.results[REFERENCE]["samples"]
    best = {bits: chosen[f"calibquant-paper-{bits}"] for bits in CALIBRATED_BITS}
    return best, {"split": "calibration", "samples": samples, "chosen": chosen, "metrics": grid}


def earlier_tau(folder: Path, stem: str) -> tuple[dict[int, tuple], dict[str, Any]]:
    """What `search_tau` found in an earlier run, with the commit it ran on."""
    data = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
    grid = {"commit": data["commit"]} | data["tau_grid"]
    best = {b: tuple(grid["chosen"][f"calibquant-paper-{b}"]) for b in CALIBRATED_BITS}
    return best, grid


def cheaply_scored(task: Task) -> Task:
    """The task without the metrics that take minutes of a CPU; `--rescore` adds them."""
    return replace(task, metrics=("accuracy",))


def differences(
    evaluation: Evaluation, ran: Mapping[str, str], widths: tuple[int, ...]
) -> dict[str, Any]:
    """Paired differences of all metrics: to 16 bit, and duotone to its width's other rows."""
    pairs = [(label, REFERENCE) for label in ran]
    pairs += [
        (f"duotone @{b}", label)
        for b in widths
        for label in ran
        if label.endswith(f" @{b}") and label != f"duotone @{b}"
    ]
    scores = {label: evaluation.scores[source] for label, source in ran.items()}
    scores[REFERENCE] = evaluation.scores[REFERENCE]
    return {
        f"{label} - {baseline}": {
            name: paired_difference(scores[label][name], scores[baseline][name]).to_dict()
            for name in scores[label]
            if name in scores[baseline]
        }
        for label, baseline in pairs
    }


def table_of_task(loaded: Loaded, task: Task, plan: Plan) -> tuple[dict[str, Any], Evaluation]:
    """Everything about one task: the JSON, and the evaluation with its answers."""
    started = time.monotonic()
    if plan.grid_of:
        tau, grid = earlier_tau(plan.grid_of, plan.stem(task.name))
    else:
        tau, grid = search_tau(loaded, task, plan) if plan.grid else (RELEASED_TAU, None)
    log(task.name, "tau", tau)
    specs = {label: spec for b in plan.bits for label, spec in table_specs(b, tau.get(b)).items()}
    to_run, ran = distinct(specs)
    left = plan.minutes and max(plan.minutes - (time.monotonic() - started) / 60, 0.5)
    evaluation = run_evaluation(loaded, task, to_run, plan.n, kl=plan.kl, **plan.settings(left))
    results = evaluation.results
    schemes = {REFERENCE: results[REFERENCE]}
    schemes |= {label: results[source] | {"ran_as": source} for label, source in ran.items()}
    data = {
        "schema": "duotone.quality/1",
        **stamp(loaded.model.device),
        "task": task.name,
        "headline": task.headline,
        "later_question": plan.later_question,
        "samples": results[REFERENCE]["samples"],
        "tau_grid": grid,
        "schemes": {label: trimmed(result) for label, result in schemes.items()},
        "differences": differences(evaluation, ran, plan.bits),
    }
    return data, evaluation


def trimmed(result: Mapping[str, Any]) -> dict[str, Any]:
    """A scheme's result without the header that the file has once."""
    header = ("schema", "created", "commit", "versions", "device")
    return {name: value for name, value in result.items() if name not in header}


def write_answers(path: Path, evaluation: Evaluation) -> None:
    """One line per sample: the question, its references, and the answer of every scheme."""
    with path.open("x", encoding="utf-8") as file:
        for i, example in enumerate(evaluation.examples):
            row = {
                "name": example.name,
                "question": example.question,
                "answers": list(example.answers),
                "objects": sorted(example.objects),
                "given": {label: texts[i] for label, texts in evaluation.answers.items()},
            }
            file.write(json.dumps(row) + "\n")


def scores_of_answers(data: Mapping[str, Any], rows: list[dict]) -> dict[str, dict[str, Any]]:
    """{label: {metric: Score}} of stored answers."""
    examples = [
        Example(r["name"], (), r["question"], tuple(r["answers"]), frozenset(r["objects"]))
        for r in rows
    ]
    source = {label: result.get("ran_as", label) for label, result in data["schemes"].items()}
    texts = {ran: [row["given"][ran] for row in rows] for ran in set(source.values())}
    scores = {ran: TASKS[data["task"]].score(examples, given) for ran, given in texts.items()}
    return {label: scores[ran] for label, ran in source.items()}


def rescore(folder: Path, out: Path) -> None:
    """Recompute the text metrics of stored answers, e.g. METEOR where Java is."""
    for path in sorted(folder.glob("*.answers.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        name = path.name.replace(".answers.jsonl", ".json")
        data = json.loads((folder / name).read_text(encoding="utf-8"))
        scores = scores_of_answers(data, rows)
        for label, result in data["schemes"].items():
            intervals = {n: confidence_interval(s).to_dict() for n, s in scores[label].items()}
            result["metrics"] |= intervals
            result["caption_tokenizer"] = result["caption_tokenizer"] and tokenizer_name()
        for pair, difference in data["differences"].items():
            ours, baseline = (scores[label] for label in pair.split(" - "))
            for metric in ours:
                difference[metric] = paired_difference(ours[metric], baseline[metric]).to_dict()
        write_new_json(out / name, data)
        log("rescored", name)


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--n", type=int, default=500, help="held-out samples per task")
    parser.add_argument("--calibration", type=int, default=200, help="samples of the tau grid")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--no-kl", action="store_true")
    parser.add_argument("--later-question", action="store_true", help="files: TASK-later.*")
    parser.add_argument("--bits", default=",".join(map(str, BITS)), help="widths of the table")
    parser.add_argument("--no-grid", action="store_true", help="tau (0, 3) instead of a search")
    parser.add_argument("--grid-of", type=Path, help="take tau from the grids of an earlier run")
    parser.add_argument("--rescore-later", action="store_true", help="only agreement and KL now")
    parser.add_argument("--impl", default="auto", help="decode attention of the few-bit caches")
    parser.add_argument("--minutes", type=float, help="per task; stops at a batch, keeps the rest")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--model")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rescore", type=Path, help="folder of an earlier run")
    arguments = parser.parse_args()
    if arguments.rescore:
        rescore(arguments.rescore, arguments.out)
        return
    plan = Plan(
        arguments.n,
        arguments.calibration,
        arguments.batch_size,
        not arguments.no_kl,
        arguments.later_question,
        arguments.minutes,
        arguments.workers,
        tuple(int(bits) for bits in arguments.bits.split(",")),
        not arguments.no_grid,
        arguments.grid_of,
        arguments.rescore_later,
        arguments.impl,
    )
    loaded = load(arguments.model, arguments.device)
    for name in arguments.tasks.split(","):
        task = cheaply_scored(TASKS[name]) if plan.rescore_later else TASKS[name]
        data, evaluation = table_of_task(loaded, task, plan)
        stem = plan.stem(name)
        write_new_json(arguments.out / f"{stem}.json", data)
        write_answers(arguments.out / f"{stem}.answers.jsonl", evaluation)
        log("wrote", stem)


if __name__ == "__main__":
    main()
