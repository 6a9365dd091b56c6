"""KL from 16 bit along whole conversations, token by token: `duotone-mixed` beside KIVI and rivals.

    PYTHONPATH=src:. python -m benchmarks.quality.conversation llava --zoo FOLDER \\
        --out results/zoo/conversation

FOLDER/MODEL are weights of `training.zoo.train`; `talks.py` says what a conversation is. Its length
is the longest that the model was trained on; --parts 4 reads four times as many tokens, which no
model was trained on. Every picture is one step, every other token one more, so each answer token is
read from the cache as `generate` would have it. KL is over answer tokens, intervals over
conversations. Bytes are of `cache.memory()`, at the end and their mean over steps, numbers
without codes in 16 bit. KIVI's code needs fewer bytes than its row here, in which packed tokens
also have V in 16 bit: `published_bytes` counts its windows and codes as published.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache

import duotone
from benchmarks.quality.calibrations import CALIBRATION, without_data
from benchmarks.quality.talks import Talk, talk, trained_length
from benchmarks.quality.zoo import _on, ratio
from duotone import CacheSpec, QuantizedCache
from duotone.calibrate import Settings, calibrate
from duotone.calibrate.text import joined, text_settings, written_data
from duotone.calibrate.written import Written
from duotone.loading import Loaded
from duotone.quant.bases import KIND
from duotone.quant.our_schemes import with_pictures
from duotone.report.provenance import stamp, write_new_json
from training.zoo.batches import Batch
from training.zoo.train import HELD_OUT, Feed
from training.zoo.unseen import EVERY
from training.zoo.vocabulary import ID, TOKENS

PARTS = ("kl", "kl_pictures", "kl_text")
KIVI = "kivi@2, released"
TEXT = ("calibrated@2", "calibrated@1.5")
OURS = "duotone-mixed@4"
# In labels of rows with fewer bits for pictures than the preset of that name has.
ONE_BIT = "duotone@1"
# Of KIVI's code: recent tokens; a scale and a zero-point for 32 numbers.
WINDOW, GROUP_BITS = 128, 1


def default() -> dict[str, CacheSpec]:
    """{label: spec}: KIVI, the default, the same with pictures at 1 bit, and one with less text."""
    ours, few = (duotone.scheme("duotone-mixed", bits=bits, pictures=1) for bits in (4, 2))
    return {
        KIVI: duotone.scheme("kivi", bits=2, released=True),
        f"{OURS}, {ONE_BIT}": ours,
        f"{OURS}, whole pictures": with_pictures(ours, duotone.scheme("duotone-whole")),
        OURS: duotone.scheme("duotone-mixed", bits=4),
        f"duotone-mixed@2, {ONE_BIT}": few,
    }


def presets() -> dict[str, CacheSpec]:
    """{label: spec}: KIVI with our window, and further presets of ours."""
    return {
        "kivi@2": duotone.scheme("kivi", bits=2),
        "duotone-stream@2": duotone.scheme("duotone-stream", bits=2),
        "duotone-stream@4": duotone.scheme("duotone-stream", bits=4),
        f"duotone-mixed@1, {ONE_BIT}": duotone.scheme("duotone-mixed", bits=1, pictures=1),
    }


def rivals() -> dict[str, CacheSpec]:
    """{label: spec}: further widths, and schemes for all tokens with the windows of their code."""
    return {
        "kivi@4, released": duotone.scheme("kivi", bits=4, released=True),
        "innerq@2": duotone.scheme("innerq", bits=2),
        "oscar-rotation@2": duotone.scheme("oscar-rotation", bits=2),
        "oscar-scaling@2, released": duotone.scheme("oscar-scaling", bits=2, released=True),
        "kvarn K4 V2": duotone.scheme("kvarn"),
        "turboquant K3 V3": duotone.scheme("turboquant"),
        "turboquant K4 V4": duotone.scheme("turboquant", key_bits=4, value_bits=4),
    }


def ablations() -> dict[str, CacheSpec]:
    """{label: spec}: the form with pictures at 1 bit, with one part changed."""
    ours, few = (duotone.scheme("duotone-mixed", bits=bits, pictures=1) for bits in (4, 2))
    name, two = f"{OURS}, {ONE_BIT}", few.text
    key, value = ours.text.replace(key=two.key), ours.text.replace(value=two.value)
    return {
        f"{OURS}, pictures in 16 bit": with_pictures(ours, duotone.scheme("dense")),
        f"{name}, K of text in 2 bits": ours.replace(text=key),
        f"{name}, V of text in 2 bits": ours.replace(text=value),
        f"{name}, text in 3 bits": ours.replace(text=duotone.scheme("duotone-stream", bits=3).text),
        f"{name}, recent 96": ours.replace(recent=96),
        f"{name}, recent 0": ours.replace(recent=0),
        f"{name}, no sinks": ours.replace(sink=0),
        f"duotone-mixed@2, {ONE_BIT}, recent 32": few.replace(recent=32),
    }


def made_up(model: Any, batch: Batch, tokens: int, folder: Path) -> dict[str, CacheSpec]:
    """{label: spec}: the default with pictures by a calibration that had no data, then text, too.

    tokens: of a stretch of text that the model writes itself. It begins as all rows of training do.
    """
    ours = duotone.scheme("duotone-mixed", bits=4)
    (pictures,) = without_data(model, batch, folder).values()
    if isinstance(pictures, str):
        raise ValueError(f"a row needs a calibration; got {pictures}")
    rows = {f"{OURS}, pictures calibrated": with_pictures(ours, pictures)}
    loaded = Loaded(model.config.model_type, model, None)
    written = Written(tokens, begin=(ID["<bos>"],), tokens=len(TOKENS))
    for name in TEXT:
        settings = text_settings(name, Settings())
        samples = written_data(loaded, written, settings).batches
        file = folder / f"{name}.safetensors"
        bases, text, _ = calibrate(loaded, samples, settings, file=str(file))
        bases.save(file)
        rows[f"{name}, pictures too"] = joined(text, pictures, len(bases.key))
    return rows


SETS = {"default": default, "presets": presets, "rivals": rivals, "ablations": ablations}


def published_bytes(bits: int, tokens: int, numbers: int) -> float:
    """Bytes of KIVI's code for one sequence. numbers: of K in one token, over all layers."""
    recent_keys, recent_values = tokens % WINDOW, min(tokens, WINDOW)
    dense = recent_keys + recent_values
    return numbers * (16 * dense + (bits + GROUP_BITS) * (2 * tokens - dense)) / 8


def bytes_in_16_bit(cache: QuantizedCache) -> int:
    """Bytes of a cache if its numbers without codes had 16 bit.

    States that stay transformers' own, as Gemma 3's sliding windows, are left out: all rows have
    the same ones.
    """
    memory = cache.memory()
    packed = memory.total_bytes - memory.state_bytes - memory.dense_bytes
    return packed + 2 * memory.dense_bytes // cache.timeline.stores[0].dtype.itemsize


@dataclass
class Read:
    """Sums of one row over batches: KL by conversation, bytes of a conversation by batch."""

    kl: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in PARTS})
    right: list[Tensor] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)

    def row(self, name: str, tokens: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return a row of a file. tokens: of answers, by part and conversation."""
        found: dict[str, Any] = {"row": name}
        for part, sums in self.kl.items():
            joined = torch.cat(sums)
            found[part], found[f"{part}_interval"] = ratio(joined, tokens[part])
            found[f"{part}_sums"] = [float(f"{x:.4g}") for x in joined.tolist()]
        found["accuracy"] = torch.cat(self.right).double().mean().item()
        return found | {"bytes": _mean(self.end), "bytes_mean": _mean(self.mean)}


def measure(talks: list[Talk], rows: Mapping[str, CacheSpec], impl: str = "auto") -> list[dict]:
    """A row per spec, after one of 16 bit. A row that fails has no numbers, and ends no others."""
    tokens: dict[str, list[Tensor]] = {name: [] for name in PARTS}
    found: dict[str, Read] = {name: Read() for name in rows}
    failed: dict[str, str] = {}
    right = []
    for each in talks:
        exact = each.read(DynamicCache(config=each.model.config.get_text_config()))
        right.append(exact.argmax(-1) == each.truth)
        for part, count in each.sums(torch.ones(len(exact))).items():
            tokens[part].append(count)
        for name, spec in rows.items():
            if name in failed:
                continue
            try:
                _read(each, spec, impl, exact, found[name])
            except (RuntimeError, ValueError) as error:
                failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {failed.get(name, 'read')}", flush=True)
    counts = {part: torch.cat(sums) for part, sums in tokens.items()}
    plain: dict[str, Any] = {"row": "16 bit", "accuracy": torch.cat(right).double().mean().item()}
    plain |= {f"tokens{part[2:]}": count.int().tolist() for part, count in counts.items()}
    return [
        plain,
        *(
            {"row": name, "failed": failed[name]}
            if name in failed
            else found[name].row(name, counts) | _spec_of(spec)
            for name, spec in rows.items()
        ),
    ]


def _spec_of(spec: CacheSpec) -> dict[str, Any]:
    """The spec for a file; nothing of one that names bases, which are gone with their folder."""
    data = spec.to_dict()
    return {} if f"{KIND}:" in json.dumps(data) else {"spec": data}


def _read(each: Talk, spec: CacheSpec, impl: str, exact: Tensor, found: Read) -> None:
    sizes: list[int] = []
    cache = QuantizedCache(each.model, spec, impl=impl)
    ours = each.read(cache, lambda cache: sizes.append(bytes_in_16_bit(cache)))
    for part, sums in each.sums((exact.exp() * (exact - ours)).sum(-1)).items():
        found.kl[part].append(sums)
    found.right.append(ours.argmax(-1) == each.truth)
    rows = len(each.batch.ids)
    found.end.append(sizes[-1] / rows)
    found.mean.append(_mean(sizes) / rows)


def _mean(numbers: list) -> float:
    return sum(numbers) / len(numbers)


def _sizes(model: Any, lengths: list[int]) -> dict[str, Any]:
    """Bytes of a conversation in 16 bit and as KIVI publishes it: at its end, mean over steps."""
    facts = QuantizedCache(model, duotone.scheme("kivi", released=True)).facts
    numbers = sum(shape.kv_heads * shape.head_dim for shape in facts.shapes)
    counts = {"16 bit": [4 * numbers * n for n in lengths]}
    counts |= {
        f"kivi@{bits}, published": [published_bytes(bits, n, numbers) for n in lengths]
        for bits in (2, 4)
    }
    return {name: {"bytes": x[-1], "bytes_mean": _mean(x)} for name, x in counts.items()}


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=EVERY)
    parser.add_argument("--zoo", type=Path, required=True, help="folder of weights")
    parser.add_argument("--rows", type=int, default=16, help="conversations of a batch")
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument(
        "--parts", type=int, default=1, help="of a conversation, in trained lengths"
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="of rows")
    parser.add_argument("--only", nargs="+", help="rows of the sets; all of them, if left out")
    parser.add_argument("--seed", type=int, default=HELD_OUT, help="of the held-out batches")
    parser.add_argument("--impl", default="auto", help="reference: no kernel has to be compiled")
    parser.add_argument("--device", default="cpu", help="cuda: in float16, packed by kernels")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--made-up", action="store_true", help="rows of `duotone calibrate` without samples"
    )
    args = parser.parse_args()
    dtype = torch.float32 if args.device == "cpu" else torch.float16
    model = AutoModelForImageTextToText.from_pretrained(args.zoo / args.model, dtype=torch.float32)
    model.eval().to(args.device, dtype)
    member, feed = EVERY[args.model], Feed("cpu", args.seed, 1)
    made = (talk(member, feed, args.rows, args.parts) for _ in range(args.batches))
    talks = [Talk(model, _on(batch, args.device, dtype)) for batch in made]
    specs = {k: v for name in args.sets for k, v in SETS[name]().items()}
    specs = {name: specs[name] for name in args.only or specs}
    with TemporaryDirectory() as folder:
        if args.made_up:
            shape = replace(member.shapes[0], rows=args.rows)
            batch = _on(Feed("cpu", CALIBRATION, 1).next(shape), args.device, dtype)
            specs |= made_up(model, batch, trained_length(member), Path(folder))
        rows = measure(talks, specs, args.impl)
    header = {"schema": "duotone.conversation/1", **stamp(torch.device(args.device))}
    lengths = [step.last + 1 for step in talks[0].steps()]
    header |= {"model": args.model, "seed": args.seed, "parts": args.parts, "length": lengths[-1]}
    header |= {"trained_length": trained_length(member), "visual_tokens": talks[0].visual_tokens}
    header |= {
        "conversations": len(rows[0]["tokens"]),
        "sizes": _sizes(model, lengths),
        "rows": rows,
    }
    name = args.model if args.parts == 1 else f"{args.model}-{args.parts}"
    write_new_json(args.out / f"{name}.json", header)


if __name__ == "__main__":
    main()
