"""Train one model of the zoo from nothing on generated data, on one GPU, for a time budget.

    PYTHONPATH=src:. python -m training.zoo.train llava --seconds 90 --out out

`out/llava` then holds weights (fp16) with their config, the head that is thrown away
(sight.safetensors), train.jsonl and scores of held-out rows. The same command with --resume starts
from these weights: another warm-up, another decay. The learning rate follows the clock. The first
stage (a fifth of the time) has one picture a row and short texts, so that looking and copying are
learnt early; every visual token is trained to say which cell it shows and where (training/model.py
says why). With --device cpu --steps 3 it is a smoke test.
"""

import argparse
import copy
import json
import time
from collections import defaultdict, deque
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.optimizer import build_optimizers

from .batches import KINDS, Batch, Shape, make_batch
from .glyphs import EMPTY, load_atlas
from .members import Member, feature_module, model_inputs
from .rendering import Draw
from .unseen import EVERY

WARMUP_STEPS, DECAY, FIRST_STAGE, SIGHT = 60, 0.6, 0.2, 0.5
HELD_OUT = 10**9
AHEAD = 8  # steps whose data are made at once


def rate(step: int, progress: float) -> float:
    """Return the learning-rate factor at a step and a fraction of the time budget."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, 1 - progress) / DECAY)


class Feed:
    """Batches of fresh seeds, several steps made at once."""

    def __init__(self, device: str, seed: int, ahead: int = AHEAD):
        self.device, self.seed, self.ahead = device, seed, ahead
        self.atlas = load_atlas(device)
        self.made: dict[Shape, deque[Batch]] = defaultdict(deque)

    @torch.no_grad()
    def next(self, shape: Shape) -> Batch:
        """Return the next batch of a shape."""
        made = self.made[shape]
        if not made:
            self.seed += 1
            rows = shape.rows * self.ahead
            large = Shape(rows, shape.length, shape.side, shape.pictures, shape.frames)
            batch = make_batch(Draw(self.seed, self.device), large, self.atlas)
            # Tasks lie in order where rows have no pictures; deal them out.
            order = torch.arange(rows, device=self.device).view(shape.rows, -1).T.flatten()
            for name in ("ids", "kinds", "pixels", "cells"):
                value = getattr(batch, name)
                setattr(batch, name, None if value is None else value[order])
            batch.shape = shape
            made.extend(batch.part(i, shape.rows) for i in range(0, rows, shape.rows))
        return made.popleft()


class Trainee(nn.Module):
    """A model, and a head on its visual tokens that is thrown away."""

    def __init__(self, model: transformers.PreTrainedModel, side: int):
        super().__init__()
        self.model, self.side, self.features = model, side, None
        width = model.config.get_text_config().hidden_size
        self.sight = nn.Linear(width, EMPTY + 1 + 2 * side)
        feature_module(model).register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        # SmolVLM sets features between embeddings without a cast; under autocast dtypes differ.
        self.features = output.to(self.sight.weight.dtype)
        return self.features

    def sight_loss(self, batch: Batch) -> Tensor:
        """Return how badly visual tokens say what they show, their row and their column."""
        said = self.sight(self.features.flatten(0, -2)).float()
        what, row, column = said.split([EMPTY + 1, self.side, self.side], 1)
        cells, side = batch.cells.flatten(), batch.shape.side
        weight = torch.ones(EMPTY + 1, device=cells.device)
        weight[EMPTY] = 0.2
        place = torch.arange(len(cells), device=cells.device) % side**2
        loss = F.cross_entropy(what, cells, weight)
        return loss + F.cross_entropy(row, place // side) + F.cross_entropy(column, place % side)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean loss of answers and that of visual tokens."""
        logits = self.model(**model_inputs(self.model, batch), use_cache=False).logits
        labels = batch.labels[:, 1:].flatten()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels)
        return loss, loss.new_zeros(()) if batch.pixels is None else self.sight_loss(batch)


@torch.no_grad()
def score(model: nn.Module, batches: list[Batch]) -> dict[str, float]:
    """Return the share of answer tokens that are right given all before them, by question."""
    right, total = torch.zeros(len(KINDS)), torch.zeros(len(KINDS))
    for batch in batches:
        said = model(**model_inputs(model, batch), use_cache=False).logits[:, :-1].argmax(-1)
        kinds, hit = batch.kinds[:, 1:], said == batch.ids[:, 1:]
        right += kinds.flatten().bincount(hit.flatten().float(), len(KINDS)).cpu()
        total += kinds.flatten().bincount(minlength=len(KINDS)).cpu()
    return {
        kind: round(float(r / t), 4)
        for kind, r, t in zip(KINDS, right, total, strict=True)
        if kind and t
    }


class Run:
    """One call: its clock, its log, its weights."""

    def __init__(self, member: Member, args: argparse.Namespace):
        self.member, self.args, self.device = member, args, args.device
        self.folder = args.out / member.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.seed = int(time.time()) % 10**6 * 1000 if args.seed is None else args.seed
        model = member.build()
        self.trainee = Trainee(model, member.side)
        if args.resume:
            self.resume()
        self.trainee.to(self.device)
        self.optimizers = build_optimizers(self.trainee, args.muon_lr, args.adam_lr)
        self.feed = Feed(self.device, self.seed, 1 if args.steps else AHEAD)
        self.step, self.began = 0, time.perf_counter()

    def resume(self) -> None:
        """Take weights and head from the folder."""
        kind = transformers.AutoModelForImageTextToText
        saved = kind.from_pretrained(self.folder, dtype=torch.float32)
        self.trainee.model.load_state_dict(saved.state_dict())
        self.trainee.sight.load_state_dict(load_file(self.folder / "sight.safetensors"))

    def write(self, **row) -> None:
        """Append one line to the log, and print it."""
        line = json.dumps({"model": self.member.name} | row)
        with (self.folder / "train.jsonl").open("a") as log:
            print(line, file=log)
        print(line, flush=True)

    @property
    def progress(self) -> float:
        """Fraction of this call's steps or seconds that is over."""
        if self.args.steps:
            return self.step / self.args.steps
        return (time.perf_counter() - self.began) / self.args.seconds

    def shapes(self) -> list[Shape]:
        """Return the shapes of this step: pictures always, films and texts in turn."""
        early = self.progress < FIRST_STAGE and not self.args.resume
        first, *others = self.member.first if early else self.member.shapes
        chosen = [first, others[self.step % len(others)]]
        return [self.smaller(shape) for shape in chosen]

    def smaller(self, shape: Shape) -> Shape:
        """Return the shape with at most --rows rows."""
        rows = min(shape.rows, self.args.rows or shape.rows)
        return Shape(rows, shape.length, shape.side, shape.pictures, shape.frames)

    def train_step(self) -> dict[str, Tensor]:
        """Accumulate gradients, clip, update; return the losses without waiting."""
        losses = {}
        for shape in self.shapes():
            batch = self.feed.next(shape)
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                loss, sight = self.trainee(batch)
            name = "film" if shape.frames else "pictures" if shape.pictures else "text"
            ((1.0 if shape.pictures else 0.5) * (loss + SIGHT * sight)).backward()
            losses[name] = loss.detach()
            if shape.pictures:
                losses[f"{name}_sight"] = sight.detach()
        nn.utils.clip_grad_norm_(self.trainee.parameters(), 1.0)
        factor = rate(self.step, self.progress)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses

    def train(self) -> None:
        """Train until the budget is spent; save every half minute."""
        self.write(
            device=torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            torch=torch.__version__,
            transformers=transformers.__version__,
            parameters=sum(p.numel() for p in self.trainee.model.parameters()),
            arguments={name: str(value) for name, value in vars(self.args).items()},
        )
        saved = self.began = time.perf_counter()
        while self.progress < 1:
            losses = self.train_step()
            self.step += 1
            if self.step % self.args.log_every == 0:
                values = {name: round(loss.item(), 4) for name, loss in losses.items()}
                now = time.perf_counter()
                self.write(step=self.step, seconds=round(now - self.began, 1), loss=values)
                if now - saved > 30:
                    self.save()
                    saved = now
        self.save()

    def half(self) -> transformers.PreTrainedModel:
        """Return a copy in fp16, as it is saved."""
        hooks = feature_module(self.trainee.model)._forward_hooks
        kept = dict(hooks)
        hooks.clear()  # a hook's copy would copy the trainee
        try:
            model = copy.deepcopy(self.trainee.model).half().eval()
        finally:
            hooks.update(kept)
        model.generation_config.pad_token_id = model.config.get_text_config().pad_token_id
        model.generation_config.eos_token_id = model.config.get_text_config().eos_token_id
        return model

    def save(self) -> None:
        """Write weights and the head."""
        self.half().save_pretrained(self.folder)
        head = {name: value.contiguous() for name, value in self.trainee.sight.state_dict().items()}
        save_file(head, self.folder / "sight.safetensors")

    def finish(self) -> None:
        """Score the saved weights in bfloat16 on held-out seeds."""
        model = self.half().bfloat16()
        feed = Feed(self.device, HELD_OUT, 1)
        shapes = [self.smaller(shape) for shape in self.member.shapes]
        batches = [feed.next(shape) for shape in shapes for _ in range(self.args.heldout)]
        for batch in batches:
            batch.pixels = None if batch.pixels is None else batch.pixels.bfloat16()
        self.write(step=self.step, heldout=score(model, batches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=EVERY)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--steps", type=int, help="instead of seconds")
    parser.add_argument("--rows", type=int, help="at most so many rows a batch")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's weights")
    parser.add_argument("--seed", type=int, help="of the data; left out: the clock")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--muon-lr", type=float, default=0.008)
    parser.add_argument("--adam-lr", type=float, default=1.5e-3)
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--heldout", type=int, default=8, help="batches of each shape to score")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    run = Run(EVERY[args.model], args)
    run.train()
    run.finish()


if __name__ == "__main__":
    main()
