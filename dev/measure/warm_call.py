"""A warm call in a new block of `enable`, beside plain `generate`: milliseconds from where the user stands.

    PYTHONPATH=src python dev/measure/warm_call.py [--shape internvl3-8b] [--tokens 3428]

About 90 s on one H100 (28 layers of random weights, 15 GB). A row per call: `enter` and `exit` of the block, the first
token, the first decode step (first to second token: freezes the cache, looks at the model, first replay), the second
step, the median of later ones. All with a wait for the device after each token. Rows of plain and ours take turns.
Bound: `step 1` of ours <= `step 1` of plain + 20 ms; `whole` counts enter, first token, step 1 and exit.
"""

import argparse
import json
from contextlib import nullcontext
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch

import duotone
from duotone.bench.generate_watch import Watch
from duotone.inference import random_models as made

P = argparse.ArgumentParser()
P.add_argument("--shape", default="internvl3-8b", choices=list(made.SHAPES))
P.add_argument("--tokens", type=int, default=3428)
P.add_argument("--batch", type=int, default=1)
P.add_argument("--new", type=int, default=40)
P.add_argument("--calls", type=int, default=10)
P.add_argument("--spec", default="duotone-mixed@2", help="SCHEME or SCHEME@BITS")
P.add_argument("--device", default="cuda")
P.add_argument("--out", help="a JSON file of all rows")
A = P.parse_args()
DEVICE = torch.device(A.device)
FIELDS = ("enter", "first token", "step 1", "step 2", "later", "exit", "whole")


def call(model, given, block) -> dict[str, float]:
    watch = Watch(DEVICE, lambda: False)
    start = perf_counter()
    with block():
        entered = perf_counter()
        settings = {"max_new_tokens": A.new, "min_new_tokens": A.new, "do_sample": False}
        model.generate(**given, **settings, stopping_criteria=[watch])
        done = perf_counter()
    over = perf_counter()
    steps = [b - a for a, b in pairwise(watch.times_s)]
    found = [
        entered - start,
        watch.times_s[0] - entered,
        steps[0],
        steps[1],
        median(steps[2:]),
        over - done,
    ]
    found.append(found[0] + found[1] + found[2] + found[5])
    return {name: 1e3 * x for name, x in zip(FIELDS, found, strict=True)}


def show(name: str, row: dict[str, float]) -> None:
    print(f"{name:<14}" + "".join(f"{row[f]:>13.2f}" for f in FIELDS), flush=True)


def main() -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    model = made.random_model(A.shape, DEVICE, dtype)
    given = made.random_prompt(A.shape, model, A.batch, A.tokens)
    model.generation_config.eos_token_id = None
    name, _, bits = A.spec.partition("@")
    spec = duotone.scheme(name, **({"bits": int(bits)} if bits else {}))
    blocks = {
        "plain": nullcontext,
        "no graphs": lambda: duotone.enable(model, spec, graphs=False),
        "ours": lambda: duotone.enable(model, spec),
    }
    rows = {kind: [] for kind in blocks}
    for block in blocks.values():  # compile, warm up, capture
        for _ in range(3):
            call(model, given, block)
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    print(f"{where}, {A.shape}, batch {A.batch}, {A.tokens} + {A.new} tokens, {A.spec}, ms")
    print(" " * 14 + "".join(f"{f:>13}" for f in FIELDS))
    for _ in range(A.calls):
        for kind, block in blocks.items():
            rows[kind].append(call(model, given, block))
            show(kind, rows[kind][-1])
    middle = {k: {f: median(r[f] for r in found) for f in FIELDS} for k, found in rows.items()}
    worst = {k: {f: max(r[f] for r in found) for f in FIELDS} for k, found in rows.items()}
    for kind in rows:
        show(f"{kind} median", middle[kind])
    more = middle["ours"]["step 1"] - middle["plain"]["step 1"]
    latest = worst["ours"]["step 1"] - middle["plain"]["step 1"]
    print(
        f"step 1: {more:+.2f} ms to plain's, the worst call {latest:+.2f}; the bound is +20: {'holds' if latest <= 20 else 'DOES NOT HOLD' if more > 20 else 'holds in the median'}"
    )
    print(
        f"whole: {middle['ours']['whole'] - middle['plain']['whole']:+.2f} ms to plain's (first token {middle['ours']['first token'] - middle['plain']['first token']:+.2f})"
    )
    if A.out:
        with open(A.out, "w") as file:
            json.dump(
                {
                    "device": where,
                    "shape": A.shape,
                    "batch": A.batch,
                    "tokens": A.tokens,
                    "spec": A.spec,
                    "rows": rows,
                },
                file,
            )


if __name__ == "__main__":
    main()
