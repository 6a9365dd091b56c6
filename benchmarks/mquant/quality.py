"""Scores of quantized duotone-tiny on the held-out tasks: MQuant, baselines, ablations.

For every recipe: quantize with the tasks' calibration split, answer held-out samples greedily, and
measure KL(bf16 || quantized) per token of the bf16 model's answers. Scores come with bootstrap
intervals and with paired differences to bf16 (MQuant's Tables 2, 7, 8 and 9; AIFS computes the same
numbers as static-msq, but for the order of attention's sums). One new file per recipe in --out.

    python -m benchmarks.mquant.quality --out DIR           # then `benchmarks.mquant.gather`
    python -m benchmarks.mquant.quality --out /tmp/try --n 4 --calibration 2 --recipes rtn-w8a8

`--stress "none,normed x32"` also gives the model outlier channels, as large ones have them, without
changing what it computes in 16 bit (STRESSES). Those of `..stress` are drawn; "visual x64" takes
channels of the MLP that stand out at visual tokens (`outliers.py`), what two scales are made for.
Stressed models answer nothing: the divergence of their logits ranks recipes. Nor does any model
with `--kl-only`, since answers take most of a CPU's time.

Decoding a small model is bound by launches: several processes share a GPU well.

    for part in 1/4 2/4 3/4 4/4; do
      python -m benchmarks.mquant.quality --part $part --out $OUT & done; wait
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from duotone.evaluate.forcing import kl_divergence
from duotone.evaluate.loader import Encoder, default_workers, load_batches
from duotone.inference.batch import decode_answers, generate, make_cache, prepare
from duotone.loading import Loaded, load
from duotone.quantize import CalibrationSet, calibration_set, check_disjoint, quantize_model
from duotone.quantize.calibration import appended
from duotone.report.provenance import stamp, write_new_json
from duotone.tasks import TASKS, Example, Task
from duotone.tasks.metrics import Score, confidence_interval, paired_difference
from duotone.weights.methods.recipe import get_recipe

from ..quality.table import log
from ..stress import WEIGHT_STRESSES
from .outliers import grow_outliers

TABLE_2 = ("rtn", "smoothquant", "awq", "quarot", "mquant")
# The same methods with what their papers have: GPTQ, a scale per token, Hadamards at o_proj.
BASELINES = (
    "rtn-dynamic",
    "smoothquant-gptq",
    "smoothquant-gptq-dynamic",
    "awq-dynamic",
    "quarot-per-token",
    "quarot-vision8-per-token",
)
# MQuant by parts and linears.
MIXED = (
    "mquant-down-per-token",
    "mquant-outputs-per-token",
    "mquant-heads-outputs-per-token",
    "mquant-vision8",
    "mquant-vision8-down-per-token",
    "mquant-vision8-heads-outputs-per-token",
    "mquant-head8",
)
ABLATIONS = (
    "static",
    "static-msq",
    "static-msq-aifs",
    "static-msq-rotation",
    "mquant-always-split",
    "dynamic",
)
RECIPES = (
    *(f"{name}-w4a8" for name in (*TABLE_2, *BASELINES, *MIXED, *ABLATIONS)),
    *(f"{name}-w8a8" for name in (*TABLE_2, "quarot-per-token", "mquant-down-per-token")),
    "mquant-w4a8-g128",
    "w4a16-g128",
    "awq-w4a16-g128",
)

# Words of --recipes: all rows of a width.
WIDTHS = ("w4a8", "w8a8")
VISUAL = "visual x64"
STRESSES = (*WEIGHT_STRESSES, VISUAL)
LINE = ("linear", "mode", "scales", "damping", "alpha", "error", "error_rtn")


@dataclass
class TaskRun:
    """One task's held-out samples in batches, and what the bf16 model made of them."""

    task: Task
    batches: list[tuple[list[Example], dict[str, torch.Tensor]]]
    answers: list[list[list[int]]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)

    @property
    def examples(self) -> list[Example]:
        """All samples, without pictures."""
        return [example for examples, _ in self.batches for example in examples]


def answered(loaded: Loaded, run: TaskRun) -> tuple[dict[str, Score], list[list[list[int]]]]:
    """(scores, token ids by batch) of greedy answers."""
    token_ids, texts = [], []
    for _, encoded in run.batches:
        batch = prepare(loaded.model, encoded)
        cache = make_cache(loaded.model, None, batch)
        found = generate(loaded.model, batch, cache, run.task.max_new_tokens).token_ids
        token_ids.append(found)
        texts += decode_answers(loaded.processor, found)
    return run.task.score(run.examples, texts), token_ids


@torch.inference_mode()
def answer_logits(model: Any, encoded: dict, answers: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of the distributions that each token of the answers came from."""
    whole = {name: t.to(model.device) for name, t in appended(encoded, answers).items()}
    length = whole["input_ids"].shape[1]
    longest = max(map(len, answers))
    logits = model(**whole, logits_to_keep=longest + 1).logits[:, :-1].float()
    # Answers end at the right edge: the last len(ids) positions of a row are its own.
    place = torch.arange(length - longest, length)
    own = torch.stack([place >= length - len(ids) for ids in answers])
    return logits[own.to(logits.device)]


def divergence(model: Any, run: TaskRun) -> dict[str, Score]:
    """Per-token KL to bf16 and share of equal most likely tokens, with sums per sample."""
    rows = []
    for (_, encoded), answers, wanted in zip(run.batches, run.answers, run.logits, strict=True):
        logits = answer_logits(model, encoded, answers)
        kl = kl_divergence(wanted, logits).double()
        same = (wanted.argmax(-1) == logits.argmax(-1)).double()
        lengths = [len(ids) for ids in answers]
        parts = zip(kl.split(lengths), same.split(lengths), lengths, strict=True)
        rows += [[float(k.sum()), float(s.sum()), count] for k, s, count in parts]
    table = np.array(rows)
    return {"kl": Score(table[:, [0, 2]]), "same_top_token": Score(table[:, [1, 2]])}


def reference(loaded: Loaded, task: Task, samples: int, batch_size: int) -> TaskRun:
    """Held-out samples with the bf16 model's answers, logits and scores."""
    encoder = Encoder(loaded.processor, loaded.takes_images)
    workers = default_workers(loaded.model.device)
    made = list(load_batches(task, encoder, "heldout", samples, batch_size, workers))
    run = TaskRun(task, made)
    run.scores, run.answers = answered(loaded, run)
    run.logits = [
        answer_logits(loaded.model, encoded, answers)
        for (_, encoded), answers in zip(made, run.answers, strict=True)
    ]
    return run


def task_result(
    loaded: Loaded, run: TaskRun, *, is_reference: bool = False, kl_only: bool = False
) -> dict[str, Any]:
    """Metrics with intervals, paired differences to bf16, KL of each sample."""
    scores = {} if kl_only else run.scores if is_reference else answered(loaded, run)[0]
    agreement = divergence(loaded.model, run)
    intervals = {n: confidence_interval(s).to_dict() for n, s in (scores | agreement).items()}
    differences = {n: paired_difference(s, run.scores[n]).to_dict() for n, s in scores.items()}
    return {
        "samples": len(run.examples),
        "headline": run.task.headline,
        "metrics": intervals,
        "differences": {} if is_reference else differences,
        # [sum over tokens, tokens], in the order of the samples: rows are compared in pairs.
        "kl_by_sample": [[float(f"{kl:.4g}"), int(n)] for kl, n in agreement["kl"].statistics],
    }


def result_of(
    loaded: Loaded,
    runs: Sequence[TaskRun],
    name: str,
    about: dict[str, Any],
    started: float,
    kl_only: bool = False,
) -> dict[str, Any]:
    """The file of one recipe."""
    given = {"is_reference": name == "bf16", "kl_only": kl_only}
    tasks = {r.task.name: task_result(loaded, r, **given) for r in runs}
    return {
        "schema": "duotone.mquant.quality/1",
        **stamp(loaded.model.device),
        "recipe": name,
        **about,
        "tasks": tasks,
        "seconds": round(time.monotonic() - started, 2),
    }


def put_stress(model: Any, stress: str, data: CalibrationSet) -> None:
    """Give the model outlier channels in place; its function stays."""
    if stress == VISUAL:
        grow_outliers(model, data.batches, 64)
    else:
        WEIGHT_STRESSES[stress](model)


def quantized_result(
    arguments: argparse.Namespace,
    name: str,
    stress: str,
    runs: Sequence[TaskRun],
    data: CalibrationSet,
) -> dict[str, Any]:
    """Quantize a fresh model by one recipe and score it."""
    started = time.monotonic()
    loaded = load(arguments.model, arguments.device)
    put_stress(loaded.model, stress, data)
    report = quantize_model(
        loaded.model, get_recipe(name), data, name=loaded.name, impl=arguments.impl
    )
    log(name, f"quantized in {time.monotonic() - started:.1f} s")
    sources = report["calibration"]["sources"]
    about = {"settings": report["recipe"], "calibration": sources, "bytes": report["bytes"]}
    about["stress"] = stress
    kl_only = arguments.kl_only or stress != "none"
    if not kl_only:
        lines = [{k: line[k] for k in LINE if k in line} for line in report["linears"]]
        about["linears"] = lines
    return result_of(loaded, runs, name, about, started, kl_only)


def show(result: dict[str, Any]) -> None:
    """One line of headline scores and KL."""
    words = []
    for name, task in result["tasks"].items():
        metrics = task["metrics"]
        head = metrics.get(task["headline"], {"value": float("nan")})["value"]
        words.append(f"{name} {task['headline']} {head:.3f} KL {metrics['kl']['value']:.5f}")
    about = result["recipe"], result["stress"]
    log(*about, "|", " | ".join(words), "|", result["seconds"], "s")


def chosen_recipes(arguments: argparse.Namespace) -> list[str]:
    """Names of this process's share, checked before any work."""
    names = arguments.recipes.split(",")
    if arguments.recipes in WIDTHS:
        names = [name for name in RECIPES if name.endswith(f"-{arguments.recipes}")]
    for name in names:
        get_recipe(name)
    unknown = set(arguments.stress.split(",")) - set(STRESSES)
    if unknown:
        raise SystemExit(f"--stress must be some of {STRESSES}, got {sorted(unknown)}")
    mine, of = map(int, arguments.part.split("/"))
    if not 1 <= mine <= of:
        raise SystemExit(f"--part must be I/N with 1 <= I <= N, got {arguments.part}")
    return names[mine - 1 :: of]


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--recipes", default=",".join(RECIPES), help=f"or one of {WIDTHS}")
    parser.add_argument("--n", type=int, default=100, help="held-out samples per task")
    parser.add_argument("--calibration", type=int, default=32, help="samples per task")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--part", default="1/1", help="I/N: every N-th recipe from the I-th on")
    parser.add_argument("--stress", default="none", help=", ".join(STRESSES))
    parser.add_argument("--kl-only", action="store_true", help="no answers of quantized models")
    parser.add_argument("--impl", default="auto", help="of the linears: auto or reference")
    parser.add_argument("--model")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Parse the arguments and write the files."""
    arguments = parsed()
    names, tasks = chosen_recipes(arguments), [TASKS[t] for t in arguments.tasks.split(",")]
    started = time.monotonic()
    loaded = load(arguments.model, arguments.device)
    data = calibration_set(loaded, tasks, arguments.calibration, batch_size=16)
    for task in tasks:
        check_disjoint(data.hashes, [task.example(i) for i in range(arguments.n)])
    runs = [reference(loaded, task, arguments.n, arguments.batch_size) for task in tasks]
    log("calibration and held-out data are disjoint; bf16 answered")
    if arguments.part.startswith("1/") and "none" in arguments.stress.split(","):
        result = result_of(loaded, runs, "bf16", {"stress": "none"}, started)
        write_new_json(arguments.out / "none" / "bf16.json", result)
        show(result)
    for stress in arguments.stress.split(","):
        for name in names:
            result = quantized_result(arguments, name, stress, runs, data)
            folder = arguments.out / stress.replace(" ", "-")
            write_new_json(folder / f"{name}.json", result)
            show(result)


if __name__ == "__main__":
    main()
