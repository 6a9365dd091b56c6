"""Train duotone-tiny from nothing on generated pictures, on one GPU, for a time budget.

Reproduce (one H200, 16 cores, about 12 minutes; repository root):

    PYTHONPATH=src python training/build.py src/duotone/models/duotone_tiny
    PYTHONPATH=src python training/train.py --minutes 10.8 --out out

`out` then holds model.safetensors (bf16), train.jsonl and heldout.json. The learning rate follows
the clock: short warm-up, constant, linear to zero over the last 60 % of the minutes. State is
saved every minute; the same command with the same --state resumes. The order in which rendered
steps arrive depends on timing, so a second run gives an equal model, not an identical one.
"""

import argparse
import json
import os
import subprocess
import time
from collections import deque
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import InternVLForConditionalGeneration

from data import BUCKETS, Encoder, Ring
from duotone.tasks.synthetic.sample import TRAIN_SEEDS
from heldout import evaluate
from model import Trainee, build_model, compile_layers, save_weights
from optimizer import build_optimizers

WARMUP_STEPS, DECAY = 200, 0.6
SIGHT = 0.5


def rate(step: int, progress: float) -> float:
    """Return the learning-rate factor at a step and a fraction of the time budget."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, 1 - progress) / DECAY)


class Feed:
    """Moves ready steps to the GPU and gives a step's memory back once the copy is done."""

    def __init__(self, ring: Ring, device: str):
        self.ring, self.device, self.sent = ring, device, deque()
        if device == "cuda":
            for step in ring.steps:
                address = step.pixels[BUCKETS[0].name].ctypes.data
                torch.cuda.cudart().cudaHostRegister(address, step.nbytes(), 0)

    def next(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Return pixels, tokens and targets of every bucket."""
        index = self.ring.ready.get()
        step = self.ring.steps[index]
        moved = {
            bucket.name: tuple(
                torch.from_numpy(arrays[bucket.name]).to(self.device, non_blocking=True)
                for arrays in (step.pixels, step.tokens, step.targets)
            )
            for bucket in BUCKETS
        }
        self._recycle(index)
        return moved

    def _recycle(self, index: int) -> None:
        event = torch.cuda.Event() if self.device == "cuda" else None
        if event:
            event.record()
        self.sent.append((index, event))
        while len(self.sent) > 2:
            index, event = self.sent.popleft()
            if event:
                event.synchronize()
            self.ring.free.put(index)


def train_step(trainee: Trainee, optimizers: list, batch: dict, factor: float) -> dict[str, Tensor]:
    """Accumulate the buckets' gradients, clip, update; return the losses without waiting."""
    losses = {}
    for bucket in BUCKETS:
        pixels, tokens, targets = batch[bucket.name]
        with torch.autocast(pixels.device.type, torch.bfloat16):
            loss, sight = trainee(pixels, tokens, targets, bucket.pictures)
        weight = (bucket.size * bucket.pictures) ** 0.5 / 10
        (weight * (loss + SIGHT * sight)).backward()
        losses[bucket.name], losses[f"{bucket.name}_sight"] = loss.detach(), sight.detach()
    nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak", group["lr"]) * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


def describe() -> dict:
    """Return what a log reader needs to know about the machine and the code."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": git.stdout.strip() or None,
        "cpus": os.cpu_count(),
        "samples_per_step": {name: n for bucket in BUCKETS for name, n in bucket.rows},
    }


class Run:
    """One training run: its clock, its log, its saved state."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        encoder = Encoder(args.model)
        self.ring = Ring(args.model, TRAIN_SEEDS, args.workers, int(time.time()))
        self.model = build_model(args.model, self.device)
        self.trainee = Trainee(self.model, encoder).to(self.device)
        self.optimizers = build_optimizers(self.trainee, args.muon_lr, args.adam_lr)
        self.step, self.seconds = 0, 0.0
        self.log = (args.out / "train.jsonl").open("a")
        if args.state and args.state.exists():
            self.resume()
        if self.device == "cuda":
            compile_layers(self.model)

    def resume(self) -> None:
        """Continue from the state file."""
        state = torch.load(self.args.state, map_location=self.device)
        self.trainee.load_state_dict(state["trainee"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        """Write the state file and the weights so far."""
        if self.args.state:
            state = {
                "trainee": self.trainee.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "step": self.step,
                "seconds": self.seconds,
            }
            torch.save(state, self.args.state.with_suffix(".part"))
            self.args.state.with_suffix(".part").rename(self.args.state)
        save_weights(self.model, self.args.out / "model.safetensors")

    def write(self, row: dict) -> None:
        """Append one line to the log."""
        print(json.dumps(row), file=self.log, flush=True)
        print(json.dumps(row), flush=True)

    def train(self) -> None:
        """Train until the clock says the schedule is over, or this call's share of it is."""
        self.write({**describe(), **{k: str(v) for k, v in vars(self.args).items()}})
        feed, budget = Feed(self.ring, self.device), self.args.minutes * 60
        begin, saved = time.perf_counter() - self.seconds, self.seconds
        mark, mark_step = self.seconds, self.step
        stop = min(budget, self.seconds + self.args.stop_after * 60)
        while self.seconds < stop:
            factor = rate(self.step, self.seconds / budget)
            losses = train_step(self.trainee, self.optimizers, feed.next(), factor)
            self.step += 1
            if self.step % self.args.log_every == 0:
                values = {name: round(loss.item(), 4) for name, loss in losses.items()}
                self.seconds = time.perf_counter() - begin
                speed = (self.step - mark_step) / (self.seconds - mark)
                mark, mark_step = self.seconds, self.step
                self.write({
                    "step": self.step, "seconds": round(self.seconds, 1), "loss": values,
                    "lr": round(factor, 4), "samples_per_second": round(speed * SAMPLES, 1),
                    "ready": self.ring.ready.qsize(),
                })  # fmt: skip
            if self.seconds - saved > 60:
                saved = self.seconds
                self.save()
            self.seconds = time.perf_counter() - begin
        self.save()
        self.ring.close()

    def finish(self) -> None:
        """Score the bf16 weights on held-out samples, in a model that was never compiled."""
        model = InternVLForConditionalGeneration._from_config(
            self.model.config, dtype=torch.bfloat16
        )
        model.load_state_dict(self.model.state_dict())
        model = model.to(self.device).eval()
        scores, rows = evaluate(model, self.args.model, self.args.heldout)
        self.write({"step": self.step, "heldout": scores})
        (self.args.out / "heldout.json").write_text(json.dumps({"scores": scores}, indent=2))
        lines = "\n".join(json.dumps(row) for row in rows)
        (self.args.out / "predictions.jsonl").write_text(lines + "\n")


SAMPLES = sum(bucket.size for bucket in BUCKETS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("src/duotone/models/duotone_tiny"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="where to keep the resumable state")
    parser.add_argument("--minutes", type=float, default=10.8, help="length of the schedule")
    parser.add_argument("--stop-after", type=float, default=1e9, help="minutes of this call")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--muon-lr", type=float, default=0.008)
    parser.add_argument("--adam-lr", type=float, default=1.5e-3)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--heldout", type=int, default=300)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    run.train()
    run.finish()


if __name__ == "__main__":
    main()
