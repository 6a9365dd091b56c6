"""Speed of the whole Qwen2-VL-7B with random weights, transformers' modules: MQuant's Table 3.

    python -m benchmarks.mquant.model --out DIR                     model.json, a few minutes
    python -m benchmarks.mquant.model --out DIR --layers 2 --tokens 2048
    python -m benchmarks.mquant.model --out DIR --tiny              a CPU will do: does it run?

Prefill: one picture and text, vision tower and projector included, the median of a few runs.
Decode: one token behind a static cache, under a CUDA graph. 16 bit and recipes of
`duotone quantize`, with modules fused (`duotone.hf.weights.fusion`) and each by itself. Parameters
are random and static scales fixed: nothing is said about quality.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duotone.bench.timing import Clock, CudaClock, copy_tb_per_s, rotated_us
from duotone.hf.weights.fusion import fuse, unfuse
from duotone.report.provenance import stamp

from . import random_model

TOKENS = (2048, 8192, 16384)
# The rest of a prompt is a square picture, as large as fits.
TEXT_TOKENS = 128
CONTEXT = 2048
RUNS, REPLAYS = 2, 15
# Slots of the static cache that warm-up, capture and replays fill.
STEPS = 4 * REPLAYS
RECIPES = (None, "mquant-w8a8", "mquant-w4a8", "dynamic-w4a8")
RECIPES += ("mquant-down-per-token-w4a8", "mquant-vision8-down-per-token-w4a8")
RECIPES += ("quarot-vision8-per-token-w4a8", "mquant-head8-w4a8")


class Parts:
    """Milliseconds of the vision tower and of the whole model, run by run."""

    def __init__(self, model: Any, clock: Clock) -> None:
        self.model, self.clock, self.started, self.vision_ms = model, clock, 0.0, 0.0
        tower = model.model.visual
        self.hooks = (
            tower.register_forward_pre_hook(self._begin),
            tower.register_forward_hook(self._end),
        )

    def run(self, inputs: dict[str, Tensor]) -> dict[str, float]:
        """One prefill; the host waits before and behind the vision tower."""
        self.clock.wait()
        started = self.clock.now_s()
        self.model(**inputs, logits_to_keep=1)
        self.clock.wait()
        ms = (self.clock.now_s() - started) * 1e3
        return {"ms": ms, "vision_ms": self.vision_ms}

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self.hooks:
            hook.remove()

    def _begin(self, *_: object) -> None:
        self.clock.wait()
        self.started = self.clock.now_s()

    def _end(self, *_: object) -> None:
        self.clock.wait()
        self.vision_ms = (self.clock.now_s() - self.started) * 1e3


@torch.inference_mode()
def prefill_rows(
    model: Any, tokens: list[int], clock: Clock, runs: int
) -> Iterator[dict[str, Any]]:
    """A row per number of tokens; the first run of each warms up."""
    parts = Parts(model, clock)
    try:
        for count in tokens:
            inputs = random_model.prompt(model, count, TEXT_TOKENS)
            times = [parts.run(inputs) for _ in range(runs + 1)][1:]
            middle = sorted(times, key=lambda one: one["ms"])[(len(times) - 1) // 2]
            visual = int((inputs["mm_token_type_ids"] == 1).sum())
            yield {"tokens": count, "visual_tokens": visual, **middle}
    finally:
        parts.remove()


@torch.inference_mode()
def decode_ms(model: Any, clock: Clock, context: int) -> float:
    """A step of one token, `context` in the static cache, under one graph."""
    step = random_model.decode_step(model, context, STEPS)
    for _ in range(2):
        step()
    return rotated_us(clock.capture([step]), 1, clock, REPLAYS) / 1e3


def measured(
    model: Any, tokens: list[int], clock: Clock, runs: int, context: int
) -> dict[str, Any]:
    """Decode and prefill of one model; what fails says why."""
    found: dict[str, Any] = {"prefill": []}
    try:
        found["decode_ms"] = decode_ms(model, clock, context)
    except Exception as error:
        found["decode_failed"] = f"{type(error).__name__}: {error}"[:500]
    clock.release()
    try:
        found["prefill"].extend(prefill_rows(model, tokens, clock, runs))
    except Exception as error:
        found["prefill_failed"] = f"{type(error).__name__}: {error}"[:500]
    return found


def rows_of(
    recipe: str | None, given: argparse.Namespace, clock: Clock
) -> Iterator[dict[str, Any]]:
    """A recipe's rows: fused, and every module by itself; one row in 16 bit."""
    config = random_model.config(given.tiny, given.layers)
    model = random_model.model(config, recipe, clock.device)
    common = {"recipe": recipe or "bf16", "weight_bytes": random_model.nbytes(model)}
    for fused in (True, False) if recipe else (False,):
        unfuse(model)
        modules = len(fuse(model)) if fused else 0
        found = measured(model, given.tokens, clock, given.runs, given.context)
        yield common | {"fused": fused, "fused_modules": modules} | found


def shown(row: dict[str, Any]) -> str:
    """One line."""
    cells = [f"{p['tokens']} tokens {p['ms']:.1f} ms" for p in row["prefill"]]
    cells += [f"decode {row['decode_ms']:.3f} ms"] if "decode_ms" in row else []
    cells += [row[name] for name in ("decode_failed", "prefill_failed") if name in row]
    return f"{row['recipe']}{' fused' * row['fused']}: {', '.join(cells)}"


def run(given: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """All rows; the file is written anew after each."""
    started = time.monotonic()
    data = {
        "schema": "duotone.mquant.model/1",
        **stamp(clock.device),
        "model": "tiny" if given.tiny else "Qwen2-VL-7B",
        "layers": given.layers,
        "context": given.context,
        "runs": given.runs,
        "copy_tb_per_s": copy_tb_per_s(clock) if clock.device.type == "cuda" else None,
        "rows": [],
    }
    for recipe in RECIPES:
        torch.manual_seed(0)
        for row in rows_of(recipe, given, clock):
            data["rows"].append(row)
            data["seconds"] = time.monotonic() - started
            print(f"[{data['seconds']:5.1f} s] {shown(row)}", flush=True)
            (given.out / "model.json").write_text(json.dumps(data, indent=1) + "\n")
        clock.release()
    return data


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=None)
    parser.add_argument("--layers", type=int, help="of the language model and the vision tower")
    parser.add_argument("--runs", type=int, default=RUNS, help="timed prefills per length")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before a decode step")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    given = parser.parse_args()
    given.tokens = given.tokens or ([200] if given.tiny else list(TOKENS))
    given.out.mkdir(parents=True, exist_ok=True)
    run(given, CudaClock() if torch.cuda.is_available() else Clock())


if __name__ == "__main__":
    main()
