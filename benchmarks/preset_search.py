"""Which data-free levels make the best 1-bit preset: candidates on the calibration split.

    python benchmarks/preset_search.py --out results/preset --n 200

Classes of channels, gains and groups at up to 1.3 true bits, judged by KL(16-bit || scheme) and by
the task's score, with the question asked after quantization. The held-out split is not touched.
Writes one new file per task.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import duotone
from duotone import CacheSpec, KVSpec
from duotone.evaluate import evaluate
from duotone.loading import load
from duotone.report.provenance import stamp, write_new_json
from duotone.tasks import TASKS

PRESET = duotone.scheme("duotone")
CALIBQUANT = duotone.scheme("calibquant")


def changed(part: str, **fields: Any) -> CacheSpec:
    """The preset with other fields in "key", "value" or "both"."""
    visual = PRESET.visual
    names = ("key", "value") if part == "both" else (part,)
    new = {name: getattr(visual, name).replace(**fields) for name in names}
    return PRESET.replace(visual=visual.replace(**new))


def candidates() -> dict[str, CacheSpec]:
    """{label: spec}: the preset and its neighbours, up to 1.3 true bits on spans of 256 tokens."""
    specs = {"calibquant by run, no tau": CALIBQUANT.replace(ranges="run", tau=None)}
    specs["preset"] = PRESET
    plain = changed("key", energy=0.0).visual.key
    value = changed("value", energy=0.0, gain=1.7).visual.value
    specs["no energy, V gain 1.7"] = PRESET.replace(visual=KVSpec(plain, value))
    for energy in (0.0, 0.5):
        specs[f"K energy {energy}"] = changed("key", energy=energy)
    specs["K gain 1.1"] = changed("key", gain=1.1)
    for energy, gain in ((1.0, 1.4), (1.5, 1.2), (1.5, 1.3), (2.0, 1.2)):
        specs[f"V energy {energy}, gain {gain}"] = changed("value", energy=energy, gain=gain)
    specs["V 1"] = changed("value", classes=None)
    specs["V 2,1 of 3/4"] = changed("value", classes=((2, 1 / 4), (1, 1 / 2)))
    specs["K 4,2,1 of 7/16"] = changed("key", classes=((4, 1 / 8), (2, 3 / 16), (1, 1 / 8)))
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
