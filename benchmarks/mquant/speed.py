"""Speed of the linear kernels at Qwen2-VL-7B's shapes with random weights, on one GPU.

    python -m benchmarks.mquant.speed --out DIR            mquant_speed.json, under 90 s
    python -m benchmarks.mquant.speed --out DIR --quick    fewer shapes, under 60 s

Times are medians of replayed CUDA graphs of launches on different buffers (`rotated` in
duotone.bench.timing): microseconds per launch, as in a model whose layers follow each other.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from duotone.bench.timing import Clock, CudaClock, Work, copy_tb_per_s, rotated_count, rotated_us
from duotone.report.provenance import stamp

from . import cases

REPEATS = 7
# Copies of a prefill product: its operands alone outgrow L2.
PREFILL_COPIES = 2
PREFILL_TOKENS, DECODE_TOKENS = (2048, 8192, 16384), (1, 16)
# Above, unpacking in flight has lost; the row is left out.
MAX_FUSED_TOKENS = 2048


def timed_us(work: list[Work], clock: Clock) -> float:
    """Median per launch; everything has run before it is captured."""
    for one in work:
        one()
    return rotated_us(clock.capture(work), len(work), clock, REPEATS)


def copies_of(name: str, tokens: int, nbytes: int | None, clock: Clock) -> list[cases.Linear]:
    """Copies of a linear with buffers of their own; nbytes: read by one decode launch."""
    count = PREFILL_COPIES if nbytes is None else rotated_count(nbytes, clock.free_bytes())
    return [cases.Linear(*cases.LINEARS[name], tokens) for _ in range(count)]


def rows_of(tokens: int) -> dict[str, cases.Row]:
    """Rows that are timed at this shape."""
    if tokens in DECODE_TOKENS:
        return cases.DECODE
    rows = cases.PREFILL | cases.CHAINS
    return {n: r for n, r in rows.items() if n != "w4a8 fused" or tokens <= MAX_FUSED_TOKENS}


def linear_row(name: str, tokens: int, clock: Clock) -> dict[str, Any]:
    """{row: us} of one linear at one number of tokens."""
    outs, ins, _ = cases.LINEARS[name]
    small = tokens in DECODE_TOKENS
    linears = copies_of(name, tokens, outs * ins // 2 if small else None, clock)
    times: dict[str, float | str] = {}
    for label, row in rows_of(tokens).items():
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
        lines.append(f"  {label:30} {us:9.1f} us  {versus}")
    return "\n".join(lines)


def run(quick: bool, folder: Path, clock: Clock) -> None:
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
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    run(arguments.quick, arguments.out, CudaClock())


if __name__ == "__main__":
    main()
