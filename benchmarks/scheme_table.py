"""Scheme x bits -> quality, true bits, bytes: the embedded multimodal model, and text models.

    python benchmarks/scheme_table.py --out results/schemes
    python benchmarks/scheme_table.py --model STORIES --data IDS --out results/schemes

STORIES: a folder with stories260k (karpathy/tinyllamas) for transformers. IDS: a JSON list of
TinyStories' validation documents, each a list of token ids.

Pictures: held-out samples of the tasks with the question asked after the pictures' cache was
quantized; score, KL(16-bit || scheme) of the next token, bits and bytes. Text (--data): perplexity
of every token from its quantized past. Rows: `scheme_rows.py`. One new file per task or model.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from quality_table import (
    cheaply_scored,
    differences,
    distinct,
    log,
    run_evaluation,
    trimmed,
    write_answers,
)
from scheme_rows import picture_rows, text_rows

from duotone.evaluate import REFERENCE, evaluate_perplexity
from duotone.loading import load
from duotone.report.provenance import stamp, write_new_json
from duotone.tasks import TASKS, Task, read_passages
from duotone.tasks.metrics import paired_difference


def depth_of(model: Any) -> int:
    """Layers of the language model."""
    return model.config.get_text_config(decoder=True).num_hidden_layers


def chosen(specs: dict, labels: str | None) -> dict:
    """All of them without labels, which are separated by semicolons."""
    return {label: specs[label] for label in labels.split(";")} if labels else specs


def pictures(arguments: argparse.Namespace) -> None:
    """One file per task, with the answers of every scheme beside it."""
    loaded = load(arguments.model, arguments.device)
    specs = chosen(picture_rows(arguments.window, depth_of(loaded.model)), arguments.rows)
    for name in arguments.tasks.split(","):
        task = cheaply_scored(TASKS[name]) if arguments.rescore_later else TASKS[name]
        evaluation, data = picture_table(loaded, task, specs, arguments)
        write_new_json(arguments.out / f"{name}.json", data)
        write_answers(arguments.out / f"{name}.answers.jsonl", evaluation)
        log("wrote", name)


def picture_table(loaded: Any, task: Task, specs: dict, arguments: argparse.Namespace):
    """(evaluation, JSON) of one task."""
    to_run, ran = distinct(specs)
    # Of the code that runs, whatever is committed meanwhile.
    made_by = stamp(loaded.model.device)
    evaluation = run_evaluation(
        loaded,
        task,
        to_run,
        arguments.n or 200,
        kl=True,
        later_question=True,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        impl=arguments.impl,
        minutes=arguments.minutes,
    )
    results = evaluation.results
    schemes = {REFERENCE: results[REFERENCE]}
    schemes |= {label: results[source] | {"ran_as": source} for label, source in ran.items()}
    data = {
        "schema": "duotone.schemes/1",
        **made_by,
        "task": task.name,
        "headline": task.headline,
        "later_question": True,
        "window": arguments.window,
        "samples": results[REFERENCE]["samples"],
        "schemes": {label: trimmed(result) for label, result in schemes.items()},
        "differences": differences(evaluation, ran, ()),
    }
    return evaluation, data


def text(arguments: argparse.Namespace) -> None:
    """Perplexity, its difference from the unquantized model, bits and bytes of every scheme."""
    loaded = load(arguments.model, arguments.device, torch.float32, with_processor=False)
    passages = read_passages(arguments.data, arguments.context)
    specs = chosen(text_rows(arguments.window, depth_of(loaded.model)), arguments.rows)
    made_by = stamp(loaded.model.device)
    evaluation = evaluate_perplexity(
        loaded.model, passages, specs, arguments.n, batch_size=arguments.batch_size
    )
    rows = text_table_rows(evaluation)
    name = Path(arguments.model).name
    data = {
        "schema": "duotone.text/1",
        **made_by,
        "model": name,
        "dtype": "float32",
        "documents": next(iter(evaluation.results.values()))["samples"],
        "context": arguments.context,
        "window": arguments.window,
        "schemes": rows,
    }
    write_new_json(arguments.out / f"{name}.json", data)


def text_table_rows(evaluation: Any) -> dict[str, Any]:
    """{label: perplexity, its paired difference from unquantized, memory and spec}."""
    reference = evaluation.scores[REFERENCE]["perplexity"]
    rows = {}
    for label, result in evaluation.results.items():
        score = evaluation.scores[label]["perplexity"]
        rows[label] = {
            "perplexity": result["metrics"]["perplexity"],
            "difference": paired_difference(score, reference).to_dict(),
            "memory": result["memory"],
            "spec": result["configuration"]["spec"],
        }
        log(f"{label:44} {rows[label]['perplexity']['value']:.4f}")
    return rows


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="the embedded one without it")
    parser.add_argument("--data", type=Path, help="token ids, .json: perplexity of a text model")
    parser.add_argument("--tasks", default=",".join(TASKS), help="of a multimodal model")
    parser.add_argument("--n", type=int, help="samples (200) or documents (all), the first ones")
    parser.add_argument("--rows", help="labels of some rows, by semicolon")
    parser.add_argument("--window", type=int, default=32, help="recent tokens of all schemes")
    parser.add_argument("--context", type=int, default=512, help="tokens per document")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--minutes", type=float, help="per task; stops at a batch")
    parser.add_argument("--impl", default="auto", help="decode attention of the few-bit caches")
    parser.add_argument("--rescore-later", action="store_true", help="only agreement and KL now")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    (text if arguments.data else pictures)(arguments)


if __name__ == "__main__":
    main()
