"""Result files of `duotone bench throughput` from what it printed.

The machine of 2026-11-21 returned only some of the files, so the lines it printed stand for the
others: `results/throughput/printed/NAME.txt`. What they do not say (bytes of the caches, the last
steps) is missing; times have two decimals. A file says "from_printed_lines": true.

    python benchmarks/throughput_printed.py results/throughput/printed/internvl2.5-8b.txt \
        --commit 38888e1... --out results/throughput --machine SOME.json
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path

from duotone.bench.throughput import ROWS, SCHEMA, Configuration
from duotone.capacity import SHAPES, read_bytes

LINE = re.compile(
    r"n=(?P<n>\d+) (?P<gb>[\d.]+) GB (?P<row>.+?)\s+batch +(?P<batch>\d+) "
    r"\(predicted (?P<predicted>\d+)\), step (?P<step>[\d.]+) ms "
    r"\(predicted (?P<step_guess>[\d.]+), roofline (?P<roofline>[\d.]+), "
    r"without attention (?P<alone>[\d.]+)\), [\d,]+ tokens/s, "
    r"prefill (?P<prefill>[\d.]+) s, (?P<attention>\w+) \((?P<wall>\d+) s\)"
)


def result(model: str, match: re.Match[str], stamp: dict) -> tuple[Configuration, dict]:
    """One line as the file that it stands for."""
    shape = SHAPES[model]
    at = Configuration(match["row"], int(match["n"]), round(float(match["gb"]) * 1e9))
    spec, batch = ROWS[at.row](), int(match["batch"])
    step_s, prefill_s = float(match["step"]) / 1e3, batch * float(match["prefill"])
    roofline_s = float(match["roofline"]) / 1e3
    return at, {
        "schema": SCHEMA,
        **stamp,
        "from_printed_lines": True,
        "model": asdict(shape),
        "configuration": asdict(at),
        "spec": None if spec is None else spec.to_dict(),
        "weight_bytes": shape.weight_bytes,
        "sequence_bytes": read_bytes(shape, spec, at.load).total,
        "dense_sequence_bytes": read_bytes(shape, None, at.load).total,
        "predicted": {"max_batch": int(match["predicted"])},
        "predicted_step_s": float(match["step_guess"]) / 1e3,
        "roofline_s": roofline_s,
        "batch": batch,
        "step_s": step_s,
        "step_without_attention_s": float(match["alone"]) / 1e3,
        "prefill_s_per_sequence": float(match["prefill"]),
        "attention": match["attention"],
        "prefill_s": prefill_s,
        "decode_tokens_per_s": batch / step_s,
        "sequences_per_s": batch / (prefill_s + at.new * step_s),
        "roofline_share": roofline_s / step_s,
        "wall_s": float(match["wall"]),
    }


def main() -> None:
    """Write a file for every line that has none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines", type=Path)
    parser.add_argument("--commit", required=True, help="of the tree that was sent")
    parser.add_argument("--machine", type=Path, required=True, help="a file of the same machine")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    like = json.loads(given.machine.read_text(encoding="utf-8"))
    names = ("created", "versions", "device", "machine")
    stamp = {name: like[name] for name in names} | {"commit": given.commit}
    model = next(name for name in SHAPES if given.lines.stem.startswith(name))
    for text in given.lines.read_text(encoding="utf-8").splitlines():
        match = LINE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{given.lines}: the benchmark prints no line like {text!r}")
        at, found = result(model, match, stamp)
        path = at.path(given.out, model)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
