"""Quality on held-out data: what each ingredient buys, and every scheme by its true bits.

    python -m benchmarks.quality.table ingredients --later-question --out results/quality
    python -m benchmarks.quality.table schemes --out results/schemes
    python -m benchmarks.quality.table text --model STORIES --data IDS --out results/schemes

STORIES: a folder with stories260k (karpathy/tinyllamas) for transformers. IDS: a JSON list of
TinyStories' validation documents, each a list of token ids.

ingredients: tau by grid search on the calibration split, then CalibQuant and the preset part by
part at 8, 4, 2 and 1 bits. schemes: every scheme, with the question asked after the pictures' cache
was quantized. text: perplexity of every token from its quantized past. All have intervals, paired
differences from 16 bit, true bits and bytes; pictures have the next token's divergence as well.
Each writes a new file per task or model. Rows: `rows.py`. Where pycocoevalcap was missing,
`--rescore DIR` makes all text metrics again from the stored answers.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from duotone.evaluate import REFERENCE, Evaluation, evaluate, evaluate_perplexity
from duotone.loading import Loaded, load
from duotone.report.provenance import stamp, write_new_json
from duotone.tasks import TASKS, Example, Task, read_passages
from duotone.tasks.metrics import confidence_interval, paired_difference, tokenizer

from ..stress import STRESSES
from .rows import CALIBRATED_BITS, TAUS, grid_specs, picture_rows, table_specs, text_rows

BITS = (8, 4, 2, 1)
GRID_SHARE = 0.4
# A file has them once, not once per scheme.
HEADER = ("schema", "created", "commit", "versions", "device")


def log(*words: Any) -> None:
    """Print a line with the time, at once."""
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def run_evaluation(
    loaded: Loaded, task: Task, specs: Mapping, arguments: argparse.Namespace, **settings: Any
) -> Evaluation:
    """`evaluate` with the command line's settings and a line of progress per batch."""
    names = ("samples", "minutes", "later_question", "batch_size", "workers", "impl")
    settings = {name: getattr(arguments, name) for name in names} | settings
    return evaluate(
        loaded.model,
        loaded.processor,
        task,
        specs,
        model_name=loaded.name,
        progress=lambda done, total: log(task.name, len(specs), "schemes", f"{done}/{total}"),
        **settings,
    )


def table_of_task(
    loaded: Loaded,
    task: Task,
    specs: Mapping[str, Any],
    arguments: argparse.Namespace,
    schema: str,
    **settings: Any,
) -> tuple[dict[str, Any], Evaluation]:
    """(JSON of one task, the evaluation with its answers); equal specs are evaluated once."""
    first: dict[Any, str] = {}
    ran = {label: first.setdefault(spec, label) for label, spec in specs.items()}
    # The state of the code that runs, whatever is committed meanwhile.
    made_by = stamp(loaded.model.device)
    to_run = {label: specs[label] for label in first.values()}
    evaluation = run_evaluation(loaded, task, to_run, arguments, **settings)
    results = {label: _trimmed(result) for label, result in evaluation.results.items()}
    schemes = {REFERENCE: results[REFERENCE]}
    schemes |= {label: results[source] | {"ran_as": source} for label, source in ran.items()}
    data = {
        "schema": schema,
        **made_by,
        "task": task.name,
        "headline": task.headline,
        "later_question": arguments.later_question,
        "window": arguments.window,
        "stress": arguments.stress,
        "samples": results[REFERENCE]["samples"],
        "schemes": schemes,
        "differences": _differences(evaluation, ran),
    }
    return data, evaluation


def _trimmed(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in HEADER}


def _differences(evaluation: Evaluation, ran: Mapping[str, str]) -> dict[str, Any]:
    """Paired differences of all metrics from 16 bit."""
    theirs = evaluation.scores[REFERENCE]
    return {
        f"{label} - {REFERENCE}": {
            name: paired_difference(score, theirs[name]).to_dict()
            for name, score in evaluation.scores[source].items()
            if name in theirs
        }
        for label, source in ran.items()
    }


def best_tau(evaluation: Evaluation, task: Task, prefix: str) -> tuple[int, int]:
    """The pair with the best headline score; ties go to more equal tokens, then to smaller tau."""

    def quality(pair: tuple[int, int]) -> tuple[float, float, int]:
        scores = evaluation.scores[f"{prefix} tau {pair[0]},{pair[1]}"]
        return scores[task.headline].value, scores["same_tokens"].value, -sum(pair)

    return max(((a, b) for a in TAUS for b in TAUS), key=quality)


def search_tau(
    loaded: Loaded, task: Task, arguments: argparse.Namespace
) -> tuple[dict[int, tuple], dict[str, Any]]:
    """(best tau of the paper's ranges by bits, the whole grid) on the calibration split."""
    specs = {label: spec for bits in CALIBRATED_BITS for label, spec in grid_specs(bits).items()}
    minutes = arguments.minutes and arguments.minutes * GRID_SHARE
    own = {"samples": arguments.calibration, "split": "calibration", "minutes": minutes}
    evaluation = run_evaluation(loaded, task, specs, arguments, **own)
    prefixes = sorted({label.split(" tau ")[0] for label in specs})
    chosen = {prefix: best_tau(evaluation, task, prefix) for prefix in prefixes}
    grid = {label: result["metrics"] for label, result in evaluation.results.items()}
    samples = evaluation.results[REFERENCE]["samples"]
    best = {bits: chosen[f"calibquant-paper-{bits}"] for bits in CALIBRATED_BITS}
    return best, {"split": "calibration", "samples": samples, "chosen": chosen, "metrics": grid}


def ingredients(loaded: Loaded, task: Task, arguments: argparse.Namespace) -> str:
    """Write the file of one task; returns its stem. With its grid of tau, but for --rows."""
    started = time.monotonic()
    tau, grid = ({}, {}) if arguments.rows else search_tau(loaded, task, arguments)
    log(task.name, "tau", tau)
    specs = {label: spec for b in BITS for label, spec in table_specs(b, tau.get(b)).items()}
    specs = _chosen(specs, arguments.rows)
    left = arguments.minutes and max(arguments.minutes - (time.monotonic() - started) / 60, 0.5)
    own = {"kl": arguments.later_question, "minutes": left}
    task = cheaply_scored(task) if arguments.rescore_later else task
    data, evaluation = table_of_task(loaded, task, specs, arguments, "duotone.quality/1", **own)
    stem = f"{task.name}-later" if arguments.later_question else task.name
    write(arguments.out, stem, data | ({"tau_grid": grid} if grid else {}), evaluation)
    return stem


def schemes(loaded: Loaded, task: Task, arguments: argparse.Namespace) -> str:
    """Write the file of one task with every scheme; returns its stem."""
    arguments.later_question = True
    specs = _chosen(picture_rows(arguments.window, depth_of(loaded.model)), arguments.rows)
    task = cheaply_scored(task) if arguments.rescore_later else task
    made = table_of_task(loaded, task, specs, arguments, "duotone.schemes/1", kl=True)
    write(arguments.out, task.name, *made)
    return task.name


def cheaply_scored(task: Task) -> Task:
    """The task without the metrics that take minutes of a CPU; `--rescore` adds them."""
    return replace(task, metrics=("accuracy",))


def depth_of(model: Any) -> int:
    """Layers of the language model."""
    return model.config.get_text_config(decoder=True).num_hidden_layers


def _chosen(specs: dict, labels: str | None) -> dict:
    """Names without labels, which are separated by semicolons."""
    return {label: specs[label] for label in labels.split(";")} if labels else specs


def write(out: Path, stem: str, data: Mapping[str, Any], evaluation: Evaluation) -> None:
    """The numbers, and a line per sample: question, references, and every scheme's answer."""
    write_new_json(out / f"{stem}.json", data)
    with (out / f"{stem}.answers.jsonl").open("x", encoding="utf-8") as file:
        for i, example in enumerate(evaluation.examples):
            row = {
                "name": example.name,
                "question": example.question,
                "answers": list(example.answers),
                "objects": sorted(example.objects),
                "given": {label: texts[i] for label, texts in evaluation.answers.items()},
            }
            file.write(json.dumps(row) + "\n")


def text(arguments: argparse.Namespace) -> None:
    """Write perplexity, its difference from 16 bit, bits and bytes of every scheme."""
    loaded = load(arguments.model, arguments.device, torch.float32, with_processor=False)
    passages = read_passages(arguments.data, arguments.context)
    specs = _chosen(text_rows(arguments.window, depth_of(loaded.model)), arguments.rows)
    made_by, size = stamp(loaded.model.device), arguments.batch_size
    evaluation = evaluate_perplexity(loaded.model, passages, specs, arguments.n, batch_size=size)
    reference = evaluation.scores[REFERENCE]["perplexity"]
    rows = {
        label: {
            "perplexity": result["metrics"]["perplexity"],
            "difference": paired_difference(
                evaluation.scores[label]["perplexity"], reference
            ).to_dict(),
            "memory": result["memory"],
            "spec": result["configuration"]["spec"],
        }
        for label, result in evaluation.results.items()
    }
    name = Path(arguments.model).name
    data = {
        "schema": "duotone.text/1",
        **made_by,
        "model": name,
        "dtype": "float32",
        "documents": evaluation.results[REFERENCE]["samples"],
        "context": arguments.context,
        "window": arguments.window,
        "schemes": rows,
    }
    write_new_json(arguments.out / f"{name}.json", data)


def rescore(folder: Path, out: Path) -> None:
    """Compute the text metrics of stored answers again, where pycocoevalcap is installed."""
    for path in sorted(folder.glob("*.answers.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        name = path.name.replace(".answers.jsonl", ".json")
        data = json.loads((folder / name).read_text(encoding="utf-8"))
        scores = _scores_of_answers(data, rows)
        for label, result in data["schemes"].items():
            intervals = {n: confidence_interval(s).to_dict() for n, s in scores[label].items()}
            result["metrics"] |= intervals
            result["caption_tokenizer"] = result["caption_tokenizer"] and tokenizer.NAME
        for pair, difference in data["differences"].items():
            ours, baseline = (scores[label] for label in pair.split(" - "))
            for metric in ours:
                difference[metric] = paired_difference(ours[metric], baseline[metric]).to_dict()
        write_new_json(out / name, data)
        log("rescored", name)


def _scores_of_answers(data: Mapping[str, Any], rows: list[dict]) -> dict[str, dict[str, Any]]:
    """{label: {metric: Score}} of stored answers."""
    examples = [
        Example(r["name"], (), r["question"], tuple(r["answers"]), frozenset(r["objects"]))
        for r in rows
    ]
    source = {label: result.get("ran_as", label) for label, result in data["schemes"].items()}
    texts = {ran: [row["given"][ran] for row in rows] for ran in set(source.values())}
    scores = {ran: TASKS[data["task"]].score(examples, given) for ran, given in texts.items()}
    return {label: scores[ran] for label, ran in source.items()}


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="?", choices=("ingredients", "schemes", "text"))
    parser.add_argument("--tasks", default=",".join(TASKS), help="of a multimodal model")
    parser.add_argument("--n", type=int, help="held-out samples per task (500, schemes 200)")
    parser.add_argument("--calibration", type=int, default=200, help="samples of the tau grid")
    parser.add_argument("--later-question", action="store_true", help="files: TASK-later.*")
    parser.add_argument("--rows", help="labels of some schemes, by semicolon")
    parser.add_argument("--window", type=int, default=32, help="recent tokens of all schemes")
    parser.add_argument("--data", type=Path, help="token ids of text, .json")
    parser.add_argument("--context", type=int, default=512, help="tokens per document of text")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--minutes", type=float, help="per task; stops at a batch, keeps the rest")
    parser.add_argument("--impl", default="auto", help="decode attention of the few-bit caches")
    parser.add_argument("--rescore-later", action="store_true", help="only agreement and KL now")
    parser.add_argument("--rescore", type=Path, help="folder of an earlier run")
    parser.add_argument("--model", help="the embedded one without it")
    parser.add_argument("--stress", choices=STRESSES, default="none", help="`benchmarks.stress`")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.rescore:
        rescore(arguments.rescore, arguments.out)
    elif arguments.table == "text":
        text(arguments)
    elif arguments.table:
        arguments.samples = arguments.n or {"ingredients": 500, "schemes": 200}[arguments.table]
        loaded = load(arguments.model, arguments.device)
        STRESSES[arguments.stress](loaded.model)
        run = {"ingredients": ingredients, "schemes": schemes}[arguments.table]
        for name in arguments.tasks.split(","):
            log("wrote", run(loaded, TASKS[name], arguments))
    else:
        parser.error("name a table, or a folder by --rescore")


if __name__ == "__main__":
    main()
