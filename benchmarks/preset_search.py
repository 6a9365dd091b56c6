"""Which data-free levels make the best 1-bit preset: candidates on the calibration split.

    python benchmarks/preset_search.py --out results/preset --n 200

Levels, gains (constant, or fitted per block from its own covariances) and ranges, judged by
KL(16-bit || scheme) and by the task's score, with the question asked after quantization. The
held-out split is not touched. Writes one new file per task.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.evaluate import evaluate
from duotone.loading import load
from duotone.provenance import stamp, write_new_json
from duotone.tasks import TASKS

GAINS = (1.0, 1.2, 1.3, 1.4, 1.57, "fit")


def lloyd(key_gain: float | str, value_gain: float | str, **fields: Any) -> CacheSpec:
    """1-bit Lloyd levels with the given gains; `group` goes to both tensors."""
    group = fields.pop("group", None)
    key, value = (
        TensorSpec(1, levels="lloyd", gain=g, group=group) for g in (key_gain, value_gain)
    )
    return CacheSpec(visual=KVSpec(key, value), **fields)


def classes(
    key: tuple[tuple[int, float], ...],
    value: tuple[tuple[int, float], ...] | None = None,
    value_gain: float = 1.57,
) -> CacheSpec:
    """Unequal channels of K in groups of 64 tokens, and of V if given; a range per image."""
    k = TensorSpec(1, group=64, levels="lloyd", gain="fit", classes=key)
    v = TensorSpec(1, levels="lloyd", gain=value_gain, classes=value)
    return CacheSpec(visual=KVSpec(k, v), ranges="run")


def class_candidates() -> dict[str, CacheSpec]:
    """{label: spec}: at most 1.3 true bits on spans of 256 tokens (LOG.md, 2026-11-21)."""
    two, three = ((4, 1 / 8), (2, 1 / 4)), ((4, 1 / 8), (2, 3 / 16), (1, 1 / 8))
    value = ((2, 1 / 8), (1, 3 / 4))
    return {
        "preset": duotone.scheme("duotone"),
        "K 4,2": classes(two),
        "K 4,2 V gain 1.7": classes(two, value_gain=1.7),
        "K 4,2 V 2,1": classes(two, value),
        "K 4,2 V 2,1 gain 1.7": classes(two, value, 1.7),
        "K 4,2,1 V 2,1": classes(three, value),
        "calibquant by run": duotone.scheme("calibquant").replace(ranges="run", tau=None),
    }


def candidates() -> dict[str, CacheSpec]:
    """{label: spec}: gains of K and V first one by one, then shared, then smaller groups."""
    specs = {"calibquant": duotone.scheme("calibquant"), "minmax": duotone.scheme("minmax")}
    specs["calibquant, no tau"] = specs["calibquant"].replace(tau=None)
    for k, v in itertools.product((1.0, 1.3, "fit"), GAINS):
        specs[f"lloyd K {k} V {v}"] = lloyd(k, v)
    for gain, group in itertools.product((1.0, "fit"), (128, 64)):
        specs[f"lloyd K,V {gain} g{group}"] = lloyd(gain, gain, group=group)
    specs["lloyd K,V fit by run"] = lloyd("fit", "fit", ranges="run")
    specs["lloyd K,V 1.3,1.4 by run"] = lloyd(1.3, 1.4, ranges="run")
    specs["lloyd K,V fit tau 0,1"] = lloyd("fit", "fit", tau=(0, 1))
    specs |= class_candidates()
    specs["lloyd 2 bit"] = duotone.scheme("lloyd", bits=2)
    return specs


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--device")
    parser.add_argument("--one-step", action="store_true", help="read prompt and question at once")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    loaded = load(None, arguments.device)
    for name in arguments.tasks.split(","):
        started = time.monotonic()
        evaluation = evaluate(
            loaded.model,
            loaded.processor,
            TASKS[name],
            candidates(),
            arguments.n,
            split="calibration",
            batch_size=arguments.batch_size,
            later_question=not arguments.one_step,
            kl=True,
            workers=arguments.workers,
            minutes=arguments.minutes,
        )
        write(arguments.out, name, evaluation.results, loaded)
        print(name, f"{time.monotonic() - started:.0f} s", flush=True)


def write(out: Path, task: str, results: dict[str, Any], loaded: Any) -> None:
    """One file: score, KL and true bits of every candidate; the best by KL on standard output."""
    headline = next(iter(results.values()))["headline"]
    rows = {}
    for label, result in results.items():
        bits = result["memory"].get("visual_bits_per_element")
        kept = {k: result["metrics"].get(k) for k in (headline, "kl", "same_answer")}
        rows[label] = {**kept, "visual_bits_per_element": bits}
    write_new_json(
        out / f"{task}.json",
        {
            "schema": "duotone.preset/1",
            **stamp(loaded.model.device),
            "task": task,
            "headline": headline,
            "split": "calibration",
            "samples": next(iter(results.values()))["samples"],
            "candidates": rows,
        },
    )
    ranked = sorted(rows.items(), key=lambda item: (item[1]["kl"] or {"value": 0})["value"])
    for label, row in ranked:
        kl = f"{row['kl']['value']:.4f}" if row["kl"] else "-"
        print(f"{task:10} {label:28} KL {kl:>8} {headline} {row[headline]['value']:.4f}")


if __name__ == "__main__":
    main()
