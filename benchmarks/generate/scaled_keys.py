"""Time per token of `generate` with keys that are scaled in every layer, and in none.

    python -m benchmarks.generate.scaled_keys --model internvl3-8b --out results/generate

Random weights are alike in all channels, so the rule is lifted for one of the rows. Times are of
NEW tokens less those of FEW, the median of ROUNDS rounds, in turns.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import duotone
from duotone.hf.model import key_scales
from duotone.inference.random_models import SHAPES, marked_prompt, random_model
from duotone.report.provenance import stamp, write_new_json

FEW, NEW, ROUNDS = 8, 136, 5
SCHEMES = {"duotone@1": ("duotone", 1), "duotone-whole@1": ("duotone-whole", 1)}


@contextmanager
def scaled(always: bool) -> Iterator[None]:
    """Scale keys of every layer, or by the rule."""
    before, key_scales.FAR = key_scales.FAR, 0.5 if always else key_scales.FAR
    key_scales._FOUND.clear()
    try:
        yield
    finally:
        key_scales.FAR = before
        key_scales._FOUND.clear()


def seconds(model: Any, spec: Any, given: dict[str, Any], mask: Any, new: int) -> float:
    """Wall time of one call with `new` tokens."""
    with duotone.enable(model, spec, visual_mask=mask):
        started = time.perf_counter()
        model.generate(**given, min_new_tokens=new, max_new_tokens=new, do_sample=False)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(model: Any, batch: int, tokens: int, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """A row per scheme: milliseconds per token as keys are, and scaled."""
    given, mask = marked_prompt(model, batch, tokens)
    rows = []
    for label, (name, bits) in SCHEMES.items():
        spec = duotone.scheme(name, bits=bits)
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds + 1):  # the first one compiles and captures
            for always, found in times.items():
                with scaled(always):
                    few, new = (seconds(model, spec, given, mask, n) for n in (FEW, NEW))
                found.append(1e3 * (new - few) / (NEW - FEW))
        plain, more = (median(found[1:]) for found in times.values())
        rows.append({"row": label, "ms_plain": plain, "ms_scaled": more})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="internvl3-8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=3328)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(args.model, device, dtype)
    rows = measure(model, args.batch, args.tokens)
    header = {"schema": "duotone.scaled_keys/1", **stamp(device), "model": args.model}
    header |= {"batch": args.batch, "tokens": args.tokens, "rows": rows}
    write_new_json(args.out / f"scaled-keys-{args.model}.json", header)


if __name__ == "__main__":
    main()
