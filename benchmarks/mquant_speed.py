"""Speed of the linear kernels at Qwen2-VL-7B's shapes with random weights, on one GPU.

    python benchmarks/mquant_speed.py --out DIR            mquant_speed.json, under 90 s
    python benchmarks/mquant_speed.py --out DIR --quick    fewer shapes, under 60 s
    python benchmarks/mquant_speed.py --out DIR --tune 60  tile sizes tried for 60 s: tune.json
    python benchmarks/mquant_speed.py --out DIR --tune 120 --families batch    only of W8A8 at 2 to
                                                           512 tokens, beside cuBLAS

Times are medians of replayed CUDA graphs of launches on different buffers (`rotated` in
duotone.bench.timing): microseconds per launch, as in a model whose layers follow each other.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from duotone.bench.timing import CudaClock, Work, copy_tb_per_s, rotated_count, rotated_us
from duotone.report.provenance import stamp

import mquant_cases as cases
import mquant_tune

REPEATS = 7
# Copies of a prefill product: its operands alone outgrow L2.
PREFILL_COPIES = 2
PREFILL_TOKENS, DECODE_TOKENS = (2048, 8192, 16384), (1, 16)
# Above, unpacking in flight has lost; the row is left out.
MAX_FUSED_TOKENS = 2048


def timed_us(work: list[Work], clock: CudaClock) -> float:
    """Median per launch; everything has run before it is captured."""
    for one in work:
        one()
    return rotated_us(clock.capture(work), len(work), clock, REPEATS)


def copies_of(name: str, tokens: int, nbytes: int | None, clock: CudaClock) -> list[cases.Linear]:
    """The same linear with buffers of its own; nbytes: of what one decode launch reads."""
    count = PREFILL_COPIES if nbytes is None else rotated_count(nbytes, clock.free_bytes())
    return [cases.Linear(*cases.LINEARS[name], tokens) for _ in range(count)]


def rows_of(name: str, tokens: int) -> dict[str, cases.Row]:
    """What is timed at this shape."""
    if tokens in DECODE_TOKENS:
        return cases.DECODE
    rows = cases.PREFILL | cases.CHAINS | cases.PREPARATIONS
    if name == "down":
        rows |= cases.GATE_ONLY
    if name == "o":
        # attention's output is its input as it is
        rows.pop("prepare bf16")
    return {n: r for n, r in rows.items() if n != "w4a8 fused" or tokens <= MAX_FUSED_TOKENS}


def linear_row(name: str, tokens: int, clock: CudaClock) -> dict[str, Any]:
    """{row: us} of one linear at one number of tokens."""
    outs, ins, _ = cases.LINEARS[name]
    small = tokens in DECODE_TOKENS
    linears = copies_of(name, tokens, outs * ins // 2 if small else None, clock)
    times: dict[str, float | str] = {}
    for label, row in rows_of(name, tokens).items():
        try:
            times[label] = timed_us([lambda c=c, r=row: r(c) for c in linears], clock)
        except Exception as error:
            times[label] = f"{type(error).__name__}: {error}"[:300]
    del linears
    clock.release()
    return {"linear": name, "tokens": tokens, "out": outs, "in": ins, "us": times}


def shown(row: dict[str, Any]) -> str:
    """One line per time, with its ratio to bf16."""
    if "failed" in row:
        return row["failed"]
    lines = [f"{row['linear']} {row['tokens']} tokens ({row['out']} x {row['in']})"]
    operations = 2 * row["tokens"] * row["out"] * row["in"]
    for label, us in row["us"].items():
        if isinstance(us, str):
            lines.append(f"  {label:30} {us}")
            continue
        base = row["us"]["chain bf16" if label.startswith("chain") else "bf16"]
        versus = f"{base / us:5.2f}x bf16  {operations / us / 1e6:7.0f} Tops"
        lines.append(f"  {label:30} {us:9.1f} us  {'' if 'prepare' in label else versus}")
    return "\n".join(lines)


def run(quick: bool, folder: Path, clock: CudaClock) -> None:
    """All rows; the file is written anew after each."""
    started = time.monotonic()
    data = {
        "schema": "duotone.mquant.speed/1",
        **stamp(clock.device),
        "copy_tb_per_s": copy_tb_per_s(clock),
        "rows": [],
    }
    names = ("gate_up", "down", "qkv", "o")
    prefill = PREFILL_TOKENS[:1] if quick else PREFILL_TOKENS
    jobs = []
    for tokens in DECODE_TOKENS + prefill:
        jobs += [lambda n=n, t=tokens: linear_row(n, t, clock) for n in names]
    for job in jobs:
        try:
            row = job()
        except Exception as error:
            row = {"failed": f"{type(error).__name__}: {error}"[:500]}
        data["rows"].append(row)
        print(f"[{time.monotonic() - started:5.1f} s] {shown(row)}", flush=True)
        data["seconds"] = time.monotonic() - started
        (folder / "mquant_speed.json").write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tune", type=float, metavar="SECONDS")
    parser.add_argument("--families", default=",".join(mquant_tune.FAMILIES))
    arguments = parser.parse_args()
    names = arguments.families.split(",")
    if unknown := [name for name in names if name not in mquant_tune.FAMILIES]:
        parser.error(f"--families are of {', '.join(mquant_tune.FAMILIES)}; got {unknown}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    clock = CudaClock()
    torch.manual_seed(0)
    if arguments.tune:
        mquant_tune.run(arguments.tune, arguments.out, clock, names)
    else:
        run(arguments.quick, arguments.out, clock)


if __name__ == "__main__":
    main()
