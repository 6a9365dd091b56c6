"""Token rows of the zoo: pictures, turns in random order, or text alone; one shape a batch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .rendering import Draw, render
from .tasks import NO_CELL, PICTURES, compact, film, lexicon, number, take, tokens
from .vocabulary import (
    ASKED,
    BOS,
    EOS,
    FIRST_GLYPH,
    ID,
    IMAGE,
    PAD,
    SCRIPTS,
    SPACE,
    VIDEO,
)

# Of answer tokens, by the question; 0: a token without a label.
KINDS = ("", *ASKED)
FRAMES = 4


@dataclass(frozen=True)
class Shape:
    """A batch's shape. side: cells of a picture. frames: 0, or those of a film without pictures."""

    rows: int
    length: int
    side: int = 0
    pictures: int = 0
    frames: int = 0

    @property
    def visual_tokens(self) -> int:
        """Visual tokens of one picture, or of a whole film, where two frames share theirs."""
        return self.side**2 * max(self.frames // 2, 1) if self.side else 0


@dataclass
class Batch:
    """ids and kinds: [B, L]. pixels: [B, pictures, 3, S, S]. cells: [B, pictures, side * side]."""

    shape: Shape
    ids: Tensor
    kinds: Tensor
    pixels: Tensor | None = None
    cells: Tensor | None = None

    def part(self, start: int, rows: int) -> "Batch":
        """Return `rows` rows."""
        chosen = slice(start, start + rows)
        given = (self.ids, self.kinds, self.pixels, self.cells)
        return Batch(self.shape, *(None if x is None else x[chosen] for x in given))

    @property
    def labels(self) -> Tensor:
        """Token ids of answers, -100 elsewhere."""
        return self.ids.masked_fill(self.kinds == 0, -100)


def _turn(draw: Draw, page: int | None, kind: str, asked: Tensor, answer: Tensor) -> Tensor:
    """Return [B, 2, L]: a question with its answer, and the answer's kind."""
    batch = len(asked)
    on = [] if page is None else ["page", number(asked.new_full((batch,), page))[:, 1:]]
    question = tokens(draw, batch, "<user>", *on, asked, "<assistant>")
    told = torch.cat([answer, answer.new_full((batch, 1), EOS)], 1)
    kinds = torch.full_like(told, KINDS.index(kind)).masked_fill(told == PAD, 0)
    ids = torch.cat([question, told], 1)
    return torch.stack([ids, F.pad(kinds, (question.shape[1], 0))], 1)


def _pad(turns: list[Tensor], width: int, count: int) -> Tensor:
    """Return [B, count, 2, width] of turns [B, 2, L], padded."""
    turns = [F.pad(turn, (0, width - turn.shape[2])) for turn in turns]
    return F.pad(torch.stack(turns, 1), (0, 0, 0, 0, 0, count - len(turns)))


def _join(draw: Draw, prefix: list[int], turns: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return ids and kinds [B, L]: the prefix, then turns [B, T, 2, W] in random order."""
    batch, count = turns.shape[:2]
    order = draw.uniform(batch, count).argsort(1)[..., None, None].expand_as(turns)
    ids, kinds = turns.gather(1, order).transpose(1, 2).flatten(2).unbind(1)
    filled = (ids == PAD).long().argsort(dim=1, stable=True)
    ids, kinds = ids.gather(1, filled), kinds.gather(1, filled)
    front = torch.tensor(prefix, dtype=ids.dtype, device=ids.device).expand(batch, -1)
    ids = torch.cat([front, ids], 1)
    kinds = torch.cat([torch.zeros_like(front), kinds], 1)
    room = max(length - ids.shape[1], 0)
    return F.pad(ids, (0, room))[:, :length], F.pad(kinds, (0, room))[:, :length]


def _picture_slot(draw: Draw, rows: int, side: int, atlas: Tensor, page: int | None):
    """Return pixels [B, 3, S, S], cells [B, R, C], turns [(B, 2, L)] per task, in mixed order."""
    sizes = [len(part) for part in torch.arange(rows).chunk(len(PICTURES))]
    pixels, cells, turns = [], [], []
    for name, size in zip(PICTURES, sizes, strict=False):
        scene = PICTURES[name](draw, size, side)
        pixels.append(render(scene, atlas, draw))
        cells.append(scene.cells)
        turns.append([_turn(draw, page, *turn) for turn in scene.turns])
    width = max(turn.shape[2] for task in turns for turn in task)
    count = max(map(len, turns))
    mixed = draw.uniform(rows).argsort()
    joined = torch.cat([_pad(task, width, count) for task in turns])
    return torch.cat(pixels)[mixed], torch.cat(cells)[mixed], joined[mixed]


def picture_batch(draw: Draw, shape: Shape, atlas: Tensor) -> Batch:
    """Return rows of `shape.pictures` pictures with questions about all of them."""
    several = shape.pictures > 1
    slots = [
        _picture_slot(draw, shape.rows, shape.side, atlas, page if several else None)
        for page in range(1, shape.pictures + 1)
    ]
    prefix = [BOS]
    for page in range(1, shape.pictures + 1):
        prefix += [FIRST_GLYPH + page] * several + [ID["<vision>"]]
        prefix += [IMAGE] * shape.visual_tokens + [ID["</vision>"]]
    width = max(turns.shape[3] for _, _, turns in slots)
    turns = torch.cat([F.pad(t, (0, width - t.shape[3])) for _, _, t in slots], 1)
    ids, kinds = _join(draw, prefix, turns, shape.length)
    pixels = torch.stack([pixels for pixels, _, _ in slots], 1)
    cells = torch.stack([cells.flatten(1) for _, cells, _ in slots], 1)
    return Batch(shape, ids, kinds, pixels, cells)


def film_batch(draw: Draw, shape: Shape, atlas: Tensor) -> Batch:
    """Return rows of one film each; cells are those of every second frame."""
    scenes, turns = film(draw, shape.rows, shape.side, shape.frames)
    pixels = torch.stack([render(scene, atlas, draw) for scene in scenes], 1)
    made = [_turn(draw, None, *turn) for turn in turns]
    width = max(turn.shape[2] for turn in made)
    prefix = [BOS, ID["<vision>"], *[VIDEO] * shape.visual_tokens, ID["</vision>"]]
    ids, kinds = _join(draw, prefix, _pad(made, width, len(made)), shape.length)
    cells = torch.stack([scene.cells.flatten(1) for scene in scenes[::2]], 1)
    return Batch(shape, ids, kinds, pixels, cells)


def _words(draw: Draw, rows: int, count: int, distinct: bool) -> Tensor:
    """Return tokens [B, count, 6] of words of one script a row, PAD where a word has ended."""
    rank = draw.distinct(rows, 400, count) if distinct else draw.below(400, rows, count)
    script = draw.below(len(SCRIPTS), rows, 1)
    cells = lexicon(draw.device)[script, rank]
    return torch.where(cells == NO_CELL, PAD, cells + FIRST_GLYPH)


def facts(draw: Draw, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return ids and kinds [B, L]: words with numbers, later asked for in any order."""
    count = length // 26
    words = _words(draw, rows, count, distinct=True)
    digits = draw.below(10, rows, count, 3) + FIRST_GLYPH
    one = torch.ones_like(words[..., :1])
    entries = torch.cat([words, one * ID["is"], digits, one * SPACE], 2).flatten(1)
    turns = []
    for i in draw.distinct(rows, count, count).unbind(1):
        asked = tokens(draw, rows, "value", take(words, i))
        turns.append(_turn(draw, None, "is", asked, take(digits, i)))
    width = max(turn.shape[2] for turn in turns)
    told, kinds = _join(draw, [], _pad(turns, width, len(turns)), width * len(turns))
    return torch.cat([entries, told], 1), F.pad(kinds, (entries.shape[1], 0))


def copies(draw: Draw, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return ids and kinds [B, L]: a passage of words, and it once more."""
    words = _words(draw, rows, (length - 8) // 10, distinct=False)
    passage = F.pad(words, (0, 1), value=SPACE).flatten(1)
    turn = _turn(draw, None, "read", tokens(draw, rows, "read", "all"), passage)
    return torch.cat([passage, turn[:, 0]], 1), F.pad(turn[:, 1], (passage.shape[1], 0))


def text_batch(draw: Draw, shape: Shape, atlas: Tensor | None = None) -> Batch:
    """Return rows without pictures: half ask for facts, half copy."""
    parts = []
    for make, rows in ((facts, shape.rows // 2), (copies, shape.rows - shape.rows // 2)):
        ids, kinds = make(draw, rows, shape.length)
        parts.append(_join(draw, [BOS], torch.stack([ids, kinds], 1)[:, None], shape.length))
    ids, kinds = (torch.cat(both) for both in zip(*parts, strict=True))
    return Batch(shape, ids, kinds)


def make_batch(draw: Draw, shape: Shape, atlas: Tensor) -> Batch:
    """Return a batch of whichever sort the shape asks for."""
    make = film_batch if shape.frames else picture_batch if shape.pictures else text_batch
    return make(draw, shape, atlas)


__all__ = ["Batch", "Shape", "compact", "make_batch"]
