"""KL from 16 bit of presets, rivals and plain codes, on models that no preset was chosen on.

    PYTHONPATH=src:. python -m benchmarks.quality.zoo llava --zoo FOLDER --out results/zoo

FOLDER/MODEL are weights of `training.zoo.train`. Batches are held out; their pictures are read
first, all questions with their answers in one step after them, so codes are read by every answer
token. KL and accuracy are over the answers' tokens; bits are of visual tokens, parameters included.
Few sequences make up most of a KL, so intervals are over sequences, whose sums are kept for pairs.
"""

import argparse
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, Cache, DynamicCache

import duotone
from benchmarks.quality.calibrations import BY_TOKEN, CALIBRATION, calibrations, without_data
from benchmarks.quality.candidates import CANDIDATES
from benchmarks.quality.commvq import CommVQ
from benchmarks.quality.rows import GAINS
from benchmarks.stress import STRESSES
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.calibrate.oscar import StatesRecorder
from duotone.hf.model.cache_argument import CACHE
from duotone.hf.recording import recording
from duotone.quant.rivals import on_visual_spans
from duotone.report.provenance import stamp, write_new_json
from duotone.tune.bits import held
from training.zoo.batches import Batch
from training.zoo.members import model_inputs
from training.zoo.train import HELD_OUT, Feed
from training.zoo.unseen import EVERY
from training.zoo.vocabulary import ID, IMAGE

SCHEMES = ("duotone", "duotone-whole", "calibquant-paper", "calibquant")
WIDTHS = (1, 2, 3, 4)
TYPICAL = 1.96  # standard errors of an interval


def rivals() -> dict[str, CacheSpec]:
    """{label: spec}: quantizers of schemes for all tokens, on visual spans.

    Their windows are of no use here: text stays in 16 bit, as in all rows.
    """
    found = {
        "kivi@2": duotone.scheme("kivi", bits=2),
        "oscar-rotation@2": duotone.scheme("oscar-rotation", bits=2),
        "oscar-rotation, Lloyd-Max@2": duotone.scheme("oscar-rotation", bits=2, lloyd=True),
        "oscar-scaling@2": duotone.scheme("oscar-scaling", bits=2),
        "kvarn K2 V2": duotone.scheme("kvarn", key_bits=2, value_bits=2),
        "kvarn K4 V2": duotone.scheme("kvarn"),
        "turboquant K3 V3": duotone.scheme("turboquant"),
        "turboquant K4 V4": duotone.scheme("turboquant", key_bits=4, value_bits=4),
    }
    return {name: on_visual_spans(spec) for name, spec in found.items()} | corrected()


def calibrated(model: Any, batches: Sequence[Batch], file: Path) -> dict[str, CacheSpec]:
    """{label: spec}: OSCAR with rotations of the model's own states, which it writes to `file`."""
    recorder = StatesRecorder.of(model, by="benchmarks.quality.zoo")
    with recording(model, recorder.record), torch.no_grad():
        for batch in batches:
            model(**model_inputs(model, batch))
    recorder.bases().save(file)
    spec = duotone.scheme("oscar-rotation", bits=2, file=str(file))
    return {"oscar-rotation, calibrated@2": on_visual_spans(spec)}


def vector_quantized(model: Any, batches: Sequence[Batch], steps: int) -> dict[str, CommVQ]:
    """{label: codebooks} of CommVQ, trained on visual tokens of `batches`."""
    calls = [(model_inputs(model, batch), batch.ids == IMAGE) for batch in batches]
    found = CommVQ.fit(model, calls, (1, 2), steps)
    return {f"commvq@{bits}": codebooks for bits, codebooks in found.items()}


def corrected() -> dict[str, CacheSpec]:
    """{label: spec}: Jensen's correction of keys where tau would be, and with KIVI's axes."""
    plain = TensorSpec(2)
    kivi = on_visual_spans(duotone.scheme("kivi", bits=2))
    rows = {
        "min/max": CacheSpec(visual=KVSpec(plain, plain)),
        "kivi": kivi,
        "calibquant-paper, no tau": duotone.scheme("calibquant-paper", bits=1).replace(tau=None),
    }
    return {
        f"{name}, jensen@{spec.visual.key.bits}": spec.replace(
            visual=spec.visual.replace(key=spec.visual.key.replace(jensen=True))
        )
        for name, spec in rows.items()
    }


def plain_codes(bits: int) -> dict[str, CacheSpec]:
    """{label: spec}: min/max codes, and Lloyd levels with one gain; of visual tokens."""
    even = TensorSpec(bits)
    gains = (even.replace(levels="lloyd", gain=gain) for gain in GAINS.get(bits, (1.0, 1.0)))
    found = {
        "min/max": CacheSpec(visual=KVSpec(even, even)),
        "lloyd, one gain": CacheSpec(visual=KVSpec(*gains)),
    }
    return {f"{name}@{bits}": spec for name, spec in found.items()}


def specs(bits: int) -> dict[str, CacheSpec]:
    """{label: spec}: presets and plain codes, all for visual tokens."""
    presets = {f"{name}@{bits}": duotone.scheme(name, bits=bits) for name in SCHEMES}
    return presets | plain_codes(bits)


def candidates(bits: int) -> dict[str, CacheSpec]:
    """{label: spec}: what `choose.py` picks presets among."""
    return {f"parts, {name}@{bits}": parts.spec for name, parts in CANDIDATES[bits].items()}


class Conversation:
    """A held-out batch in two steps: its pictures, then all questions and answers."""

    def __init__(self, model: Any, batch: Batch) -> None:
        self.model = model
        end = int((batch.ids[0] == ID["</vision>"]).nonzero().max()) + 1
        given = model_inputs(model, batch)
        self.first = {name: _tokens(name, x, slice(0, end)) for name, x in given.items()}
        names = {*BY_TOKEN, "position_ids"} & given.keys()
        self.second = {name: _tokens(name, given[name], slice(end, None)) for name in names}
        self.answers = batch.labels[:, end + 1 :]
        self.sequences = (self.answers != -100).nonzero()[:, 0]
        self.visual = batch.ids == IMAGE

    @torch.no_grad()
    def read(self, cache: Cache) -> Tensor:
        """Log probabilities [answer tokens, vocabulary]."""
        self.model(**self.first, **{CACHE: cache})
        return self.answered(cache)

    @torch.no_grad()
    def answered(self, cache: Cache) -> Tensor:
        """Log probabilities after a cache that holds the pictures."""
        logits = self.model(**self.second, **{CACHE: cache}).logits[:, :-1]
        return logits[self.answers != -100].log_softmax(-1)

    def read_by(self, spec: CacheSpec | CommVQ, impl: str) -> tuple[Tensor, float]:
        """(log probabilities through a cache of `spec`, true bits of visual tokens)."""
        if isinstance(spec, CommVQ):
            seen = self.visual[:, : self.first["input_ids"].shape[1]]
            return self.answered(spec.cache(self.model, self.first, seen)), spec.bits
        cache = QuantizedCache(self.model, spec, impl=impl)
        return self.read(cache), held(cache, self.visual, "visual").bits

    def sums(self, each: Tensor) -> Tensor:
        """Sums over a sequence's answer tokens of a number per answer token."""
        sums = torch.zeros(len(self.answers), dtype=torch.double)
        return sums.index_add(0, self.sequences.cpu(), each.double().cpu())

    @property
    def truth(self) -> Tensor:
        """Ids of the answers' tokens."""
        return self.answers[self.answers != -100]


def _tokens(name: str, x: Tensor, span: slice) -> Tensor:
    """Part of an input that has a number per token; pictures as they are."""
    if name == "position_ids":
        return x[:, :, span]
    return x[:, span] if name in BY_TOKEN else x


@dataclass
class Sums:
    """Losses of one spec: sums over answer tokens by sequence, true bits by batch."""

    kl: list[Tensor] = field(default_factory=list)
    right: list[Tensor] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    failed: str = ""  # why there are no numbers

    def row(self, name: str, tokens: Tensor) -> dict[str, Any]:
        """Return a row of a file. tokens: of answers, by sequence."""
        if self.failed:
            return {"row": name, "failed": self.failed}
        sums = torch.cat(self.kl)
        kl, interval = ratio(sums, tokens)
        return {
            "row": name,
            "kl": kl,
            "kl_interval": interval,
            "kl_sums": [float(f"{x:.4g}") for x in sums.tolist()],
            "accuracy": _accuracy(self.right),
            "visual_bits": sum(self.bits) / len(self.bits),
        }


def measure(
    talks: Iterable[Conversation],
    rows: Mapping[str, CacheSpec | CommVQ | str],
    seconds: float = math.inf,
    impl: str = "auto",
) -> list[dict[str, Any]]:
    """A row per spec, after one of 16 bit; kl_sums: over the answer's tokens, by sequence.

    seconds: no batch begins that would end later, but the first. All rows see the same batches.
    impl: of `QuantizedCache`. A row that fails has no numbers, and does not end the others; so has
    one that is a text, the reason.
    """
    found = {name: Sums(failed=row if isinstance(row, str) else "") for name, row in rows.items()}
    right, tokens = [], []
    begun = time.monotonic()
    for done, talk in enumerate(talks):
        spent = time.monotonic() - begun
        if done and spent + spent / done > seconds:
            break
        exact = talk.read(DynamicCache(config=talk.model.config.get_text_config()))
        right.append(exact.argmax(-1) == talk.truth)
        tokens.append(talk.sums(torch.ones(len(talk.sequences))))
        for name, spec in rows.items():
            if found[name].failed:
                continue
            try:
                ours, bits = talk.read_by(spec, impl)
            except (RuntimeError, ValueError) as error:
                found[name].failed = f"{type(error).__name__}: {error}"
                print(f"{name}: {found[name].failed}", flush=True)
                continue
            found[name].kl.append(talk.sums((exact.exp() * (exact - ours)).sum(-1)))
            found[name].right.append(ours.argmax(-1) == talk.truth)
            found[name].bits.append(bits)
    counts = torch.cat(tokens)
    plain = {"row": "16 bit", "accuracy": _accuracy(right), "tokens": counts.int().tolist()}
    return [plain, *(sums.row(name, counts) for name, sums in found.items())]


def ratio(sums: Tensor, counts: Tensor) -> tuple[float, float]:
    """Mean per token of sums by sequence, and half of its interval, which is over sequences."""
    mean = sums.sum() / counts.sum()
    errors = sums - mean * counts
    return mean.item(), (TYPICAL * errors.square().sum().sqrt() / counts.sum()).item()


def _accuracy(right: Sequence[Tensor]) -> float:
    return torch.cat(list(right)).double().mean().item()


def _on(batch: Batch, device: str, dtype: torch.dtype) -> Batch:
    ids, kinds = batch.ids.to(device), batch.kinds.to(device)
    return replace(batch, ids=ids, kinds=kinds, pixels=batch.pixels.to(device, dtype))


def main() -> None:
    """Measure one model under one stress."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=EVERY)
    parser.add_argument("--zoo", type=Path, required=True, help="folder of weights")
    parser.add_argument("--stress", choices=STRESSES, default="none")
    parser.add_argument("--scale-keys", choices=("auto", "never"), default="auto")
    parser.add_argument("--rows", type=int, default=32, help="of a held-out batch")
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--seed", type=int, default=HELD_OUT, help="of the held-out batches")
    parser.add_argument("--candidates", action="store_true", help="rows to choose presets among")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="time of all batches, about"
    )
    parser.add_argument("--impl", default="auto", help="reference: no kernel has to be compiled")
    parser.add_argument("--commvq", type=int, default=0, help="steps that train V's; 0: no rows")
    parser.add_argument(
        "--calibrate", type=int, default=0, help="sequences of `duotone calibrate`; 0: no rows"
    )
    parser.add_argument(
        "--made-up", action="store_true", help="rows of `duotone calibrate` without samples"
    )
    parser.add_argument("--only", nargs="+", help="rows whose names begin so, in place of all")
    parser.add_argument("--device", default="cpu", help="cuda: in float16, packed by kernels")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dtype = torch.float32 if args.device == "cpu" else torch.float16
    model = AutoModelForImageTextToText.from_pretrained(args.zoo / args.model, dtype=torch.float32)
    STRESSES[args.stress](model.eval())
    model.to(args.device, dtype)
    feed, shape = Feed("cpu", args.seed, 1), replace(EVERY[args.model].shapes[0], rows=args.rows)
    batches = (_on(feed.next(shape), args.device, dtype) for _ in range(args.batches))
    every = {name: spec for bits in WIDTHS for name, spec in specs(bits).items()}
    if args.candidates:
        every |= {name: spec for bits in WIDTHS for name, spec in candidates(bits).items()}
    every = {name: spec.replace(scale_keys=args.scale_keys) for name, spec in every.items()}
    every |= rivals()  # With keys as they are.
    with TemporaryDirectory() as folder:
        others = Feed("cpu", CALIBRATION, 1)
        seen = [_on(others.next(shape), args.device, dtype)]
        every |= calibrated(model, seen, Path(folder, "rotations.safetensors"))
        if args.commvq:
            seen += [_on(others.next(shape), args.device, dtype) for _ in range(3)]
            every |= vector_quantized(model, seen, args.commvq)
        if args.calibrate:
            own = Feed("cpu", CALIBRATION, 1).next(replace(shape, rows=args.calibrate))
            every |= calibrations(model, _on(own, args.device, dtype), Path(folder))
        if args.made_up:
            every |= without_data(model, seen[0], Path(folder))
        if args.only:
            every = {k: v for k, v in every.items() if k.startswith(tuple(args.only))}
        talks = (Conversation(model, batch) for batch in batches)
        rows = measure(talks, every, args.seconds, args.impl)
    header = {"schema": "duotone.zoo/1", **stamp(torch.device(args.device)), "model": args.model}
    header |= {"stress": args.stress, "scale_keys": args.scale_keys, "seed": args.seed}
    header |= {"sequences": len(rows[0]["tokens"]), "rows": rows}
    write_new_json(args.out / f"{args.model}-{args.stress.replace(' ', '-')}.json", header)


if __name__ == "__main__":
    main()
