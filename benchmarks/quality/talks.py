"""Conversations of a zoo's member: held-out pictures, turns about them, and text between the turns.

A part of a conversation is a picture row and a text row of `training.zoo.batches` in one: pictures,
half of the turns about them, words with numbers or a passage to copy, the other turns, and more
text up to the part's length. So no row is padded, and pictures are at the same places in all rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from duotone.hf.model.cache_argument import CACHE
from training.zoo.batches import KINDS, Batch, Shape
from training.zoo.members import Member, model_inputs
from training.zoo.train import Feed
from training.zoo.vocabulary import ID, IMAGE, PAD

LEAST_TEXT = 128  # the shortest text that a member was trained on
ABOUT_TEXT = ("is", "read")  # questions about text of the conversation; all others: about pictures


def trained_length(member: Member) -> int:
    """Tokens of the longest rows that a member was trained on."""
    return max(shape.length for shape in member.shapes)


def talk(member: Member, feed: Feed, rows: int, parts: int) -> Batch:
    """Return conversations [rows, parts * trained length]."""
    made = [_part(member, feed, rows, first=not part) for part in range(parts)]
    columns = (torch.cat(column, 1) for column in zip(*made, strict=True))
    ids, kinds, pixels = columns
    shape = replace(member.shapes[0], rows=rows, length=ids.shape[1], pictures=pixels.shape[1])
    return Batch(shape, ids, kinds, pixels)


def _part(member: Member, feed: Feed, rows: int, first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, kinds [B, L] and pixels. first: it begins with the row's first token."""
    shape = replace(member.shapes[0], rows=rows)
    length = trained_length(member) + (not first)
    pictures = feed.next(shape)
    filled = int((pictures.ids != PAD).sum() / rows)
    about = feed.next(Shape(rows, max(LEAST_TEXT, length - filled)))
    more = feed.next(Shape(rows, max(LEAST_TEXT, length // 2)))
    whole = [
        _joined(*(_row(batch, row) for batch in (pictures, about, more))) for row in range(rows)
    ]
    ids, kinds = torch.stack([row[:, not first : length] for row in whole]).unbind(1)
    return ids, kinds, pictures.pixels


def _row(batch: Batch, row: int) -> Tensor:
    """Return [2, L]: ids and kinds of one row, without padding."""
    both = torch.stack([batch.ids[row], batch.kinds[row]])
    return both[:, both[0] != PAD]


def _joined(pictures: Tensor, text: Tensor, more: Tensor) -> Tensor:
    """Return [2, L]: pictures, half of their turns, text, the other turns, more text."""
    starts = (pictures[0] == ID["<user>"]).nonzero()[:, 0].tolist()
    middle = starts[len(starts) // 2]
    return torch.cat([pictures[:, :middle], text[:, 1:], pictures[:, middle:], more[:, 1:]], 1)


@dataclass(frozen=True)
class Step:
    """One forward pass: the inputs, and the place of its last token."""

    inputs: dict[str, Tensor]
    last: int


class Talk:
    """A batch of conversations in steps: one per picture, then one per token."""

    def __init__(self, model: Any, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.given = model_inputs(model, batch)
        about_text = [number for number, kind in enumerate(KINDS) if kind in ABOUT_TEXT]
        # By token, the first left out: answers. Of answers, by place and then by row: the row,
        # the token, and whether it is about text.
        self.answers = batch.kinds[:, 1:] > 0
        place, self.row = self.answers.T.nonzero().unbind(1)
        self.truth = batch.ids[self.row, place + 1]
        kinds = batch.kinds[self.row, place + 1]
        self.about_text = torch.isin(kinds, kinds.new_tensor(about_text))

    @property
    def visual_tokens(self) -> int:
        """Visual tokens of one conversation."""
        return int((self.batch.ids[0] == IMAGE).sum())

    def sums(self, each: Tensor) -> dict[str, Tensor]:
        """Sums by conversation of a number per answer token: of all, about pictures, about text."""
        each, row, text = (x.cpu() for x in (each.double(), self.row, self.about_text))
        weights = {"kl": torch.ones_like(each), "kl_pictures": ~text, "kl_text": text}
        sums = torch.zeros(len(self.batch.ids), dtype=torch.double)
        return {name: sums.index_add(0, row, each * weight) for name, weight in weights.items()}

    def steps(self) -> Iterator[Step]:
        """Yield the steps: a picture with its marks, and any other token by itself."""
        opened, closed = (
            (self.batch.ids[0] == ID[mark]).nonzero()[:, 0].tolist()
            for mark in ("<vision>", "</vision>")
        )
        start = 0
        for picture, (begin, end) in enumerate(zip(opened, closed, strict=True)):
            if start:
                yield from map(self._token, range(start, begin))
                start = begin
            yield Step(self._picture(picture, start, end + 1), end)
            start = end + 1
        yield from map(self._token, range(start, self.batch.ids.shape[1]))

    def _token(self, place: int) -> Step:
        # As `generate` does, none of the types by which Gemma 3 sees pictures whole.
        names = {"input_ids", "mm_token_type_ids", "position_ids"} & self.given.keys()
        return Step({name: self.given[name][..., place : place + 1] for name in names}, place)

    def _picture(self, picture: int, start: int, end: int) -> dict[str, Tensor]:
        """Inputs of tokens with one picture among them."""
        batch, shape = self.batch, replace(self.batch.shape, pictures=1)
        ids, kinds = batch.ids[:, start:end], batch.kinds[:, start:end]
        pixels = batch.pixels[:, picture : picture + 1]
        given = model_inputs(self.model, Batch(shape, ids, kinds, pixels))
        if "position_ids" in given:
            given["position_ids"] = self.given["position_ids"][..., start:end]
        if "token_type_ids" in given:  # Gemma 3 reads them from the first token on.
            given["token_type_ids"] = self.given["token_type_ids"][:, :end]
        return given

    @torch.no_grad()
    def read(self, cache: Cache, after: Any = None) -> Tensor:
        """Log probabilities [answer tokens, vocabulary], by place and then by row.

        after: called with the cache after each step.
        """
        found = []
        for step in self.steps():
            logits = self.model(**step.inputs, **{CACHE: cache}, logits_to_keep=1).logits
            if step.last < self.answers.shape[1] and self.answers[:, step.last].any():
                found.append(logits[self.answers[:, step.last], -1].log_softmax(-1))
            if after is not None:
                after(cache)
        return torch.cat(found)
