"""Training steps as fixed-shape arrays, rendered by worker processes into shared memory.

A step has three buckets: one, two and four pictures a sample. Within a bucket every sample has the
same layout, so image tokens lie at the same places and no mask is needed. All turns of a sample
follow its pictures, which shares the visual cost; only answers are trained on.

Beside the tokens a step holds what every visual token should know (`targets`): the letters in its
left and right half, the shape, colour, pattern and size of the object it shows. Trained through a
linear head that is thrown away, they end the long plateau in which the vision tower has nothing to
tell because the decoder does not look, and the decoder does not look because there is nothing.
"""

import mmap
import multiprocessing
import string
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from duotone.tasks.synthetic import documents, pairs, scenes, sequences
from duotone.tasks.synthetic.drawing import COLOURS, SHAPES
from duotone.tasks.synthetic.sample import Mark, Sample

IMAGE_TOKENS = 256
SIDE = 256
IGNORED = -100
CELL = 16
LETTERS = string.digits + string.ascii_letters + ".,-:"
WORDS = (*SHAPES, *COLOURS, "striped", "dotted", "small", "big")
LABELS = {label: i for i, label in enumerate((*LETTERS, *LETTERS, *WORDS))}
LABEL_COUNT = 2 * len(LETTERS) + len(WORDS)
PROMPT_END = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Bucket:
    """Samples of one shape: pictures a sample, tokens a row, rows a step per generator."""

    name: str
    pictures: int
    length: int
    rows: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Rows in one step."""
        return sum(count for _, count in self.rows)


GENERATORS = {"documents": documents, "scenes": scenes, "sequences": sequences, "pairs": pairs}
BUCKETS = (
    Bucket("single", 1, 480, (("documents", 96), ("scenes", 32))),
    Bucket("double", 2, 704, (("pairs", 8),)),
    Bucket("quad", 4, 1280, (("sequences", 24),)),
)


class Encoder:
    """Turns samples into token ids and labels, exactly as the chat template would."""

    def __init__(self, folder: Path):
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.pad = self.tokenizer.token_to_id("<pad>")
        self.context = self.tokenizer.token_to_id("<IMG_CONTEXT>")
        self.prefix = cache(self._prefix)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self.tokenizer.encode(text).ids

    def _prefix(self, pictures: int) -> list[int]:
        """Return the beginning of every prompt with so many pictures."""
        ids = self.ids("<|im_start|>user\n")
        for i in range(pictures):
            ids += self.ids(f"Frame{i + 1}: <img>" if pictures > 1 else "<img>")
            ids += [self.context] * IMAGE_TOKENS + self.ids("</img>\n")
        return ids

    def picture_starts(self, pictures: int) -> list[int]:
        """Return where each picture's tokens begin."""
        ids = [None, *self.prefix(pictures)]
        neighbours = enumerate(pairwise(ids))
        return [i for i, (a, b) in neighbours if b == self.context and a != self.context]

    def row(self, pictures: int, turns: list[tuple[str, str]], length: int) -> np.ndarray:
        """Return ids and labels [2, length]; turns that do not fit are left out."""
        ids = list(self.prefix(pictures))
        labels = [IGNORED] * len(ids)
        for i, (question, answer) in enumerate(turns):
            opening = "\n<|im_start|>user\n" if i else ""
            asked = self.ids(opening + question + PROMPT_END)
            told = self.ids(answer + "<|im_end|>")
            if len(ids) + len(asked) + len(told) > length:
                break
            ids += asked + told
            labels += [IGNORED] * len(asked) + told
        row = np.full((2, length), IGNORED, np.int32)
        row[0] = self.pad
        row[0, : len(ids)], row[1, : len(ids)] = ids, labels
        return row


def cells_of(mark: Mark) -> np.ndarray:
    """Return the visual tokens whose centres a mark's disc covers."""
    reach = max(0.85 * mark.radius, 8.0)
    centres = np.arange(CELL // 2, SIDE, CELL)
    near = (centres - mark.x) ** 2 + (centres[:, None] - mark.y) ** 2 < reach**2
    return near.ravel().nonzero()[0]


def mark_targets(marks: list[Mark], targets: np.ndarray) -> None:
    """Set [pictures, tokens, labels] to one where a token shows a labelled thing."""
    for mark in marks:
        if mark.radius:
            if mark.label in LABELS:
                targets[mark.picture, cells_of(mark), LABELS[mark.label]] = 1
        elif mark.label in LETTERS:
            x, y = (int(min(max(value, 0), SIDE - 1)) for value in (mark.x, mark.y))
            label = LETTERS.index(mark.label) + len(LETTERS) * (x % CELL >= CELL // 2)
            targets[mark.picture, y // CELL * (SIDE // CELL) + x // CELL, label] = 1


def training_turns(sample: Sample, rng: Random) -> list[tuple[str, str]]:
    """Choose turns: captions first or anywhere, questions shuffled, transcripts at the end."""
    captions, transcripts = sample.of_kind("caption"), sample.of_kind("transcript")
    turns = [turn for turn in sample.turns if turn.kind not in ("caption", "transcript")]
    rng.shuffle(turns)
    for caption in captions:
        turns.insert(0 if rng.random() < 0.6 else rng.randint(1, len(turns)), caption)
    if transcripts and rng.random() < 0.6:
        turns = turns[:4] + transcripts
    return [
        (t.question, rng.choice(t.answers) if t.kind == "caption" else t.answers[0]) for t in turns
    ]


class Step:
    """The arrays of one training step, as views of one buffer."""

    def __init__(self, buffer: mmap.mmap | bytearray):
        self.buffer = buffer
        self.pixels: dict[str, np.ndarray] = {}
        self.tokens: dict[str, np.ndarray] = {}
        self.targets: dict[str, np.ndarray] = {}
        offset = 0
        for bucket in BUCKETS:
            shape = (bucket.size * bucket.pictures, SIDE, SIDE, 3)
            self.pixels[bucket.name] = np.ndarray(shape, np.uint8, buffer, offset)
            offset += self.pixels[bucket.name].nbytes
            shape = (bucket.size, 2, bucket.length)
            self.tokens[bucket.name] = np.ndarray(shape, np.int32, buffer, offset)
            offset += self.tokens[bucket.name].nbytes
            shape = (bucket.size * bucket.pictures, IMAGE_TOKENS, LABEL_COUNT)
            self.targets[bucket.name] = np.ndarray(shape, np.uint8, buffer, offset)
            offset += self.targets[bucket.name].nbytes

    @staticmethod
    def nbytes() -> int:
        """Return the size of a step's buffer."""
        picture = SIDE * SIDE * 3 + IMAGE_TOKENS * LABEL_COUNT
        return sum(b.size * (b.pictures * picture + 2 * b.length * 4) for b in BUCKETS)

    def fill(self, encoder: Encoder, rng: Random, seeds: range) -> None:
        """Render fresh samples into the arrays."""
        for bucket in BUCKETS:
            names = [name for name, count in bucket.rows for _ in range(count)]
            self.targets[bucket.name][:] = 0
            for row, name in enumerate(names):
                sample = GENERATORS[name].generate(rng.randrange(seeds.start, seeds.stop))
                self._put(bucket, row, sample, encoder, rng)

    def _put(self, bucket: Bucket, row: int, sample: Sample, encoder: Encoder, rng: Random) -> None:
        place = slice(row * bucket.pictures, (row + 1) * bucket.pictures)
        self.pixels[bucket.name][place] = [np.asarray(picture) for picture in sample.images]
        mark_targets(sample.marks, self.targets[bucket.name][place])
        turns = training_turns(sample, rng)
        self.tokens[bucket.name][row] = encoder.row(bucket.pictures, turns, bucket.length)


class Ring:
    """Steps in shared memory: workers fill free ones, the trainer takes the ready ones."""

    def __init__(self, folder: Path, seeds: range, workers: int, seed: int = 0):
        context = multiprocessing.get_context("fork")
        self.steps = [Step(mmap.mmap(-1, Step.nbytes())) for _ in range(2 * workers + 4)]
        self.free, self.ready = context.Queue(), context.Queue()
        for index in range(len(self.steps)):
            self.free.put(index)
        self.workers = [
            context.Process(target=self._work, args=(folder, seeds, seed + i), daemon=True)
            for i in range(workers)
        ]
        for worker in self.workers:
            worker.start()

    def _work(self, folder: Path, seeds: range, seed: int) -> None:
        encoder, rng = Encoder(folder), Random(f"worker {seed}")
        while True:
            index = self.free.get()
            self.steps[index].fill(encoder, rng, seeds)
            self.ready.put(index)

    def close(self) -> None:
        """Stop the workers."""
        for worker in self.workers:
            worker.terminate()
