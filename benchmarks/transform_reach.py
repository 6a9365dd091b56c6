"""How far a calibration carries: spans, pictures and questions that it did not see.

    python benchmarks/transform_reach.py --out results/transform      reach.json

The calibrated spec of the three tasks meets pictures of other sizes (one span each, of 16 to 4,096
tokens), histories of up to 32 pictures in one span, questions in other words, and is made anew
from 1 to 3 * `--samples` sequences. The model has read pictures of 256 tokens and up to four of
them only, so beyond that the share of its own 16-bit answers that is right is kept beside.
"""

import argparse
import codecs
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from quality_table import log
from transform_calibrations import Calibrator
from transform_table import KIVI_SPANS, PRESET_SETTINGS, Makes, cut_into, measured, ready

import duotone
from duotone.inference.batch import decode_answers, encode, prepare
from duotone.loading import Loaded, load
from duotone.report.provenance import stamp
from duotone.tasks import TASKS, Example
from duotone.tune.prefilled import Prefilled, later_where_possible, prefill

# Pixels per side: 4 patches of 8 and 2 x 2 of them per token.
SIDES = (64, 128, 192, 256, 384, 512, 1024)
HISTORIES = (1, 2, 4, 8)
GERMAN = {
    "describe": "beschreibe", "the": "das", "picture": "Bild", "what": "was", "is": "ist",
    "of": "von", "which": "welche", "way": "Richtung", "where": "wo", "in": "in", "frame": "Bild",
    "colour": "Farbe", "how": "wie", "many": "viele", "objects": "Dinge", "object": "Ding",
    "are": "sind", "there": "dort", "who": "wer", "much": "viel", "has": "hat", "price": "Preis",
    "room": "Zimmer", "stock": "Vorrat", "changes": "wechselt", "moves": "geht", "name": "Name",
    "number": "Nummer", "date": "Datum", "first": "zuerst", "last": "zuletzt", "seen": "sichtbar",
}  # fmt: skip
Write = Callable[[str], str]


def german(question: str) -> str:
    """Word by word, what the list has; names and shapes stay."""
    words = re.split(r"(\w+)", question)
    return "".join(GERMAN.get(word.lower(), word) for word in words)


def backwards(question: str) -> str:
    """The words from the last to the first."""
    return " ".join(reversed(question.rstrip(".?").split())) + question[-1]


def rot13(question: str) -> str:
    """Letters of no language."""
    return codecs.encode(question, "rot13")


QUESTIONS: dict[str, Write] = {
    "words in German": german,
    "words backwards": backwards,
    "letters by ROT13": rot13,
}


@dataclass(frozen=True)
class Held:
    """Held-out samples of a condition: what specs are measured on, and 16 bit's own answers."""

    batches: dict[str, list[Prefilled]]
    right: dict[str, float]


def resized(
    encoded: dict[str, torch.Tensor], side: int, image: int, tokens: int
) -> dict[str, torch.Tensor]:
    """The same prompts with pictures of `side` pixels and the tokens that these have.

    image: the id of a visual token; tokens: how many a picture has now.
    """
    pixels = torch.nn.functional.interpolate(
        encoded["pixel_values"].float(), (side, side), mode="bilinear", antialias=True
    )
    wanted = (side // 16) ** 2
    rows = []
    for ids in encoded["input_ids"].tolist():
        row, seen = [], 0
        for token in ids:
            seen = seen + 1 if token == image else 0
            row += [] if token == image and seen > wanted else [token]
            row += [image] * (wanted - tokens) if seen == tokens < wanted else []
        rows.append(row)
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    # The template's own tokens are never 0: that is the padding.
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}


@cache
def example(name: str, index: int) -> Example:
    """A held-out example, rendered once for all conditions."""
    return TASKS[name].example(index)


def examples_of(name: str, n: int, write: Write | None = None, history: int = 1) -> list[Example]:
    """Held-out examples, questions rewritten; of `history` the pictures of all and one question."""
    found = []
    for start in range(0, n - n % history, history):
        *others, last = (example(name, start + i) for i in range(history))
        pictures = tuple(p for other in others for p in other.images) + last.images
        question = write(last.question) if write else last.question
        found.append(replace(last, images=pictures, question=question))
    return found


def answered(
    loaded: Loaded, name: str, examples: Sequence[Example], side: int, size: int
) -> tuple[list[Prefilled], float]:
    """(batches answered in 16 bit, the share of answers that is right; of captions 0)."""
    config, task = loaded.model.config, TASKS[name]
    made, texts = [], []
    for start in range(0, len(examples), size):
        some = examples[start : start + size]
        encoded = encode(loaded.processor, [example.messages() for example in some])
        if side != 256:
            image = config.image_token_id
            encoded = resized(encoded, side, image, config.image_seq_length)
        batch = later_where_possible(prepare(loaded.model, encoded))
        one = prefill(loaded.model, batch, task.max_new_tokens)
        made.append(one)
        counts = one.counted.sum(1).tolist()
        rows = one.reference.argmax(-1).split(counts)
        texts += decode_answers(loaded.processor, [row.tolist() for row in rows])
    stripped = [example.without_images() for example in examples]
    scores = task.score(stripped, texts) if name != "captions" else {}
    return made, scores["accuracy"].value if scores else 0.0


def held(
    loaded: Loaded,
    tasks: Sequence[str],
    n: int,
    write: Write | None = None,
    side: int = 256,
    history: int = 1,
) -> Held:
    """Samples of a condition. Long spans are answered few at a time."""
    batches, right = {}, {}
    for name in tasks:
        examples = examples_of(name, n, write, history)
        # A batch of a hundred thousand visual tokens fits any device that this runs on.
        pictures = len(examples[0].images)
        size = max(1, min(n, 100_000 // ((side // 16) ** 2 * pictures)))
        batches[name], share = answered(loaded, name, examples, side, size)
        right |= {} if name == "captions" else {name: share}
    return Held(batches, right)


def conditions(arguments: argparse.Namespace) -> dict[str, tuple[Callable[..., Held], bool]]:
    """{title: (samples of it, whether a sequence is one span)}."""
    n, every = arguments.n, tuple(TASKS)
    found: dict[str, tuple[Callable[..., Held], bool]] = {}
    for title, write in QUESTIONS.items():
        found[f"questions: {title}"] = (partial(held, tasks=every, n=n, write=write), False)
    for side in SIDES:
        tokens, tasks = (side // 16) ** 2, every if side < 512 else ("captions", "documents")
        count = n if side < 512 else max(1, n // (side // 256))
        make = partial(held, tasks=tasks, n=count, side=side)
        found[f"pictures of {tokens:,} tokens"] = (make, False)
    for history in HISTORIES:
        count = max(n, history)
        make = partial(held, tasks=("sequences",), n=count, history=history)
        found[f"{4 * history} pictures, one span of {1024 * history:,} tokens"] = (make, True)
    return found


def specs_of(maker: Calibrator, samples: int) -> Makes:
    """The calibrated spec, cautious and bold, and what it is held against."""
    cautious = replace(PRESET_SETTINGS, regularization=1.0)
    batches = maker.some(samples)
    specs = {
        "klt, regularization 0.1": maker.spec("klt", PRESET_SETTINGS, batches=batches),
        "klt, regularization 1": maker.spec("cautious", cautious, batches=batches),
        "duotone-parts @1": duotone.scheme("duotone-parts", bits=1),
        "span, KIVI's axes @2": KIVI_SPANS,
    }
    return ready(specs)


def sample_counts(maker: Calibrator, most: int) -> Makes:
    """Specs from few sequences to all; one sequence of each task in turn."""
    base, makes = PRESET_SETTINGS, {}
    for name in TASKS:
        label = f"1 sequence of {name}"
        makes[label] = partial(maker.spec, label, base, batches=maker.some(1, (name,)))
    for n in sorted({1, 2, 5, 21, most}):
        label = f"{3 * n} sequences"
        makes[label] = partial(maker.spec, label, base, batches=maker.some(n))
    return makes


def whole(specs: Makes) -> Makes:
    """The same with one span per sequence."""
    return {
        label: (lambda make=make: make().replace(ranges="sequence"))
        for label, make in specs.items()
    }


def write(path: Path, loaded: Loaded, arguments: Any, made_by: dict, rows: dict, right: dict):
    """The file as far as it is known."""
    result = {
        "schema": "duotone.transform.reach/1",
        **made_by,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "calibration_samples_per_task": min(64, arguments.samples),
        "heldout_samples_per_task": arguments.n,
        "later_question": True,
        "right": right,
        "rows": {title: found for title, found in rows.items() if found},
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=86, help="per task, to calibrate on")
    parser.add_argument("--n", type=int, default=48, help="per task, held out")
    parser.add_argument("--only", help="conditions whose title has this in it")
    parser.add_argument("--minutes", type=float, default=3.0, help="nothing is begun later")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if (arguments.out / "reach.json").exists():
        raise SystemExit("there is a reach.json already")
    until_s = time.monotonic() + 60 * arguments.minutes
    # bfloat16 takes CPUs too long.
    dtype = None if torch.cuda.is_available() else torch.float32
    loaded = load(dtype=dtype)
    made_by, rows, right = stamp(loaded.model.device), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        maker = Calibrator(loaded, arguments.samples, 64, Path(folder))
        specs = specs_of(maker, min(64, arguments.samples))
        log("calibrated")
        for title, (make, one_span) in conditions(arguments).items():
            if (arguments.only and arguments.only not in title) or time.monotonic() > until_s:
                continue
            samples = make(loaded)
            log(title, samples.right)
            mine = whole(specs) if one_span else specs
            rows[title] = measured(loaded, samples.batches, mine, until_s)
            right[title] = samples.right
            if title == "pictures of 256 tokens":
                cut = {
                    name: [cut_into(16, b) for b in some] for name, some in samples.batches.items()
                }
                rows["spans of 16"] = measured(loaded, cut, specs, until_s)
                counts = sample_counts(maker, arguments.samples)
                rows["sequences to calibrate on"] = measured(
                    loaded, samples.batches, counts, until_s
                )
            del samples
            write(arguments.out / "reach.json", loaded, arguments, made_by, rows, right)


if __name__ == "__main__":
    main()
