"""Which data-free levels make the best 1-bit preset: candidates on the calibration split.

    python benchmarks/preset_search.py --out results/preset --n 200

Classes of channels, gains and groups at up to 1.3 true bits, judged by KL(16-bit || scheme) and by
the task's score, with the question asked after quantization. The held-out split is not touched.
Writes one new file per task.
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

Classes = tuple[tuple[int, float], ...]
CALIBQUANT = duotone.scheme("calibquant")


def classes(
    key: Classes,
    value: Classes | None = None,
    value_gain: float | str = 1.57,
) -> CacheSpec:
    """Unequal channels of K in groups of 64 tokens, and of V if given; a range per image."""
    k = TensorSpec(1, group=64, levels="lloyd", gain="fit", classes=key)
    v = TensorSpec(1, levels="lloyd", gain=value_gain, classes=value)
    return CacheSpec(visual=KVSpec(k, v), ranges="run")


def candidates() -> dict[str, CacheSpec]:
    """{label: spec}: at most 1.3 true bits on spans of 256 tokens."""
    keys = {
        "K 4,2,1": ((4, 1 / 16), (2, 1 / 4), (1, 1 / 4)),
        "K 4,2": ((4, 1 / 8), (2, 1 / 4)),
    }
    values = {
        "V 1": None,
        "V 2,1 of 7/8": ((2, 1 / 8), (1, 3 / 4)),
        "V 2,1 of 3/4": ((2, 1 / 4), (1, 1 / 2)),
    }
    specs = {"calibquant by run, no tau": CALIBQUANT.replace(ranges="run", tau=None)}
    for (key, k), (value, v) in itertools.product(keys.items(), values.items()):
        specs[f"{key}, {value}, gain 1.57"] = classes(k, v, 1.57)
    for value in ("V 2,1 of 7/8", "V 2,1 of 3/4"):
        specs[f"K 4,2, {value}, gain 1.7"] = classes(keys["K 4,2"], values[value], 1.7)
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
    parser.add_argument("--impl", default="auto", help="decode attention of the few-bit caches")
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
            impl=arguments.impl,
        )
        write(arguments.out, name, evaluation.results, loaded)
        print(name, f"{time.monotonic() - started:.0f} s", flush=True)


def write(out: Path, task: str, results: dict[str, Any], loaded: Any) -> None:
    """One file: score, KL and true bits of every candidate; the best by KL on standard output."""
    headline = next(iter(results.values()))["headline"]
    rows = {}
    for label, result in results.items():
        bits = result["memory"].get("visual_bits_per_element")
        names = (headline, "kl", "same_answer", "object_recall")
        kept = {k: v for k, v in result["metrics"].items() if k in names}
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
    ranked = sorted(rows.items(), key=lambda item: item[1].get("kl", {"value": 0})["value"])
    for label, row in ranked:
        kl = f"{row['kl']['value']:.4f}" if "kl" in row else "-"
        print(f"{task:10} {label:36} KL {kl:>8} {headline} {row[headline]['value']:.4f}")


if __name__ == "__main__":
    main()
