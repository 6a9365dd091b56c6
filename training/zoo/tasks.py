"""The zoo's pictures and what is asked about them: text, tables, charts, objects, textures."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .glyphs import CELL, CHARACTERS, EMPTY, FULL, HALF
from .rendering import COLOUR_TABLE, Draw, Scene, empty_cells, ground, paper, texture
from .vocabulary import (
    COLOURS,
    FIRST_GLYPH,
    ID,
    LETTERS,
    MOVES,
    PAD,
    SCRIPTS,
    SHAPES,
    SPACE,
    TEXTURES,
)

WORDS, WORD_LENGTH = 400, 6
FIRST_SHAPE = len(CHARACTERS)
NO_CELL = -1  # where a word has no letter


def number(value: Tensor) -> Tensor:
    """Return [B, 2], the digits' tokens of a number below 100."""
    return torch.stack([value // 10, value % 10], 1) + FIRST_GLYPH


def tokens(draw: Draw, batch: int, *parts: str | Tensor) -> Tensor:
    """Return [B, L]: words, and tokens [B] or [B, n], one after another."""
    columns = []
    for part in parts:
        if isinstance(part, str):
            part = torch.full((batch, 1), ID[part], device=draw.device)
        columns.append(part[:, None] if part.ndim == 1 else part)
    return torch.cat(columns, 1)


def take(values: Tensor, index: Tensor) -> Tensor:
    """Return `values[b, index[b]]` of every row b."""
    return values[torch.arange(len(values), device=values.device), index]


def compact(values: Tensor, hole: int) -> Tensor:
    """Move holes [..., L] to the end and keep the order of all others."""
    return values.gather(-1, (values == hole).long().argsort(dim=-1, stable=True))


@cache
def lexicon(device: str) -> Tensor:
    """Return the cells [scripts, words, 6] of made-up words of two to six letters."""
    generator = torch.Generator().manual_seed(7)
    letters = torch.rand(len(SCRIPTS), WORDS, WORD_LENGTH, generator=generator) ** 1.5 * LETTERS
    start = 10 + LETTERS * torch.arange(len(SCRIPTS))[:, None, None]
    length = torch.randint(2, WORD_LENGTH + 1, (len(SCRIPTS), WORDS, 1), generator=generator)
    cells = letters.long() + start
    return cells.masked_fill(torch.arange(WORD_LENGTH) >= length, NO_CELL).to(device)


def text_lines(draw: Draw, script: Tensor, rows: int, columns: int) -> Tensor:
    """Return cells [B, rows, columns] of words, frequent ones more often, and some numbers."""
    count = columns // 3 + 2
    rank = (draw.uniform(len(script), rows, count) ** 2 * WORDS).long()
    cells = lexicon(draw.device)[script[:, None, None], rank]
    numbers = draw.below(10, *cells.shape).masked_fill(cells == NO_CELL, NO_CELL)
    cells = torch.where(draw.uniform(*rank.shape, 1) < 0.12, numbers, cells)
    spaces = torch.full_like(cells[..., :1], EMPTY)
    return compact(torch.cat([cells, spaces], -1).flatten(2), NO_CELL)[..., :columns]


def as_tokens(cells: Tensor) -> Tensor:
    """Return the tokens of characters' cells."""
    return torch.where(cells == EMPTY, SPACE, cells + FIRST_GLYPH)


def document(draw: Draw, batch: int, side: int) -> Scene:
    """Draw lines of text; ask for lines, characters, the script."""
    script = draw.below(len(SCRIPTS), batch)
    cells = text_lines(draw, script, side, side)
    background, ink = paper(draw, batch, CELL * side)
    turns = [("script", tokens(draw, batch, "script"), (script + ID["latin"])[:, None])]
    for row in draw.distinct(batch, side, 3).unbind(1):
        asked = tokens(draw, batch, "line", number(row))
        turns.append(("line", asked, as_tokens(take(cells, row))))
    for _ in range(3):
        row, column = draw.below(side, batch), draw.below(side, batch)
        asked = tokens(draw, batch, "at", number(row), number(column))
        turns.append(("at", asked, as_tokens(take(take(cells, row), column))[:, None]))
    return Scene(cells, ink[:, None, None].expand(-1, side, side, 3), background, turns)


def table(draw: Draw, batch: int, side: int) -> Scene:
    """Draw letters with numbers of three digits; ask both ways, for the largest, for how many."""
    rows = min(side, 12)
    count = 3 + draw.below(rows - 2, batch)
    shown = torch.arange(rows, device=draw.device) < count[:, None]
    start = 10 + LETTERS * draw.below(len(SCRIPTS), batch, 1)
    keys = draw.distinct(batch, LETTERS, rows) + start
    value = draw.distinct(batch, 1000, rows)
    digits = torch.stack([value // 100, value // 10 % 10, value % 10], 2)
    cells, _ = empty_cells(draw, batch, side)
    both = torch.cat([keys[..., None], torch.full_like(digits[..., :1], EMPTY), digits], 2)
    cells[:, :rows, :5] = torch.where(shown[..., None], both, EMPTY)
    background, ink = paper(draw, batch, CELL * side)
    turns = [("count", tokens(draw, batch, "count", "all"), number(count))]
    largest = take(keys, torch.where(shown, value, -1).argmax(1))
    turns.append(("largest", tokens(draw, batch, "largest"), largest[:, None] + FIRST_GLYPH))
    for i, row in enumerate((draw.uniform(batch, 5) * count[:, None]).long().unbind(1)):
        key, of_key = take(keys, row) + FIRST_GLYPH, take(digits, row) + FIRST_GLYPH
        if i < 3:
            turns.append(("value", tokens(draw, batch, "value", key), of_key))
        else:
            turns.append(("key", tokens(draw, batch, "key", of_key), key[:, None]))
    return Scene(cells, ink[:, None, None].expand(-1, side, side, 3), background, turns)


def chart(draw: Draw, batch: int, side: int) -> Scene:
    """Draw bars over letters, in steps of half a cell; ask for heights, ends, comparisons."""
    count = 3 + draw.below(side - 2, batch)
    columns = torch.arange(side, device=draw.device)
    shown = columns < count[:, None]
    keys = draw.distinct(batch, LETTERS, side) + 10 + LETTERS * draw.below(len(SCRIPTS), batch, 1)
    height = draw.below(2 * side - 1, batch, side).masked_fill(~shown, 0)
    level = 2 * (side - 2 - columns)[:, None]  # half cells below a cell, by row
    cells = torch.where(height[:, None] >= level + 2, FULL, EMPTY)
    cells = torch.where(height[:, None] == level + 1, HALF, cells)
    cells[:, -1] = torch.where(shown, keys, EMPTY)
    background, ink = paper(draw, batch, CELL * side)
    inks = ink[:, None, None].repeat(1, side, side, 1)
    palette = COLOUR_TABLE.to(draw.device)[draw.below(6, batch, 1, side)]
    inks[:, :-1] = (0.6 * palette + 0.4 * inks[:, :1]).expand(-1, side - 1, -1, -1)
    letter = keys + FIRST_GLYPH
    order = height * side + columns  # no two alike; the one further right counts as higher
    highest = take(letter, torch.where(shown, order, -1).argmax(1))[:, None]
    lowest = take(letter, torch.where(shown, order, 10**6).argmin(1))[:, None]
    turns = [
        ("count", tokens(draw, batch, "count", "all"), number(count)),
        ("highest", tokens(draw, batch, "highest"), highest),
        ("lowest", tokens(draw, batch, "lowest"), lowest),
    ]
    for bar in (draw.uniform(batch, 4) * count[:, None]).long().unbind(1):
        asked = tokens(draw, batch, "bar", take(letter, bar))
        turns.append(("bar", asked, number(take(height, bar))))
    a, b = (draw.uniform(batch, 2) * count[:, None]).long().unbind(1)
    more = torch.where(take(order, a) > take(order, b), take(letter, a), take(letter, b))
    asked = tokens(draw, batch, "more", take(letter, a), take(letter, b))
    turns.append(("more", asked, more[:, None]))
    return Scene(cells, inks, background, turns)


def objects(draw: Draw, batch: int, side: int) -> Scene:
    """Draw coloured shapes on noise; ask for counts, places, rows."""
    share = 0.08 + 0.35 * draw.uniform(batch, 1, 1)
    shown = draw.uniform(batch, side, side) < share
    shape, colour = draw.below(len(SHAPES), batch, side, side), draw.below(8, batch, side, side)
    cells = torch.where(shown, shape + FIRST_SHAPE, EMPTY)
    ink = COLOUR_TABLE.to(draw.device)[colour] + 0.04 * draw.normal(batch, side, side, 3)
    background = ground(draw, batch, CELL * side)

    def count(what: Tensor) -> Tensor:
        return number((what & shown).sum((1, 2)).clamp(max=99))

    turns = [("count", tokens(draw, batch, "count", "all"), count(shown))]
    for values, first in ((colour, ID["red"]), (shape, ID["disc"])) * 2:
        wanted = draw.below(8 if first == ID["red"] else len(SHAPES), batch)
        asked = tokens(draw, batch, "count", wanted + first)
        turns.append(("count", asked, count(values == wanted[:, None, None])))
    named = torch.stack([colour + ID["red"], shape + ID["disc"]], 3)
    named = named.masked_fill(~shown[..., None], PAD)
    nothing = torch.full((batch, 1), ID["nothing"], device=draw.device)
    for _ in range(2):
        row, column = draw.below(side, batch), draw.below(side, batch)
        pair = take(take(named, row), column)
        pair = torch.cat([pair, nothing.masked_fill(pair[:, :1] != PAD, PAD)], 1)
        turns.append(("at", tokens(draw, batch, "at", number(row), number(column)), pair))
        listed = torch.cat([take(named, row).flatten(1), nothing], 1)
        turns.append(("row", tokens(draw, batch, "row", number(row)), listed))
    return Scene(cells, ink, background, turns)


def surface(draw: Draw, batch: int, side: int) -> Scene:
    """Draw one texture in two colours; ask for its kind, direction and colours."""
    kind, direction = draw.below(len(TEXTURES), batch), draw.below(8, batch)
    two = draw.distinct(batch, len(COLOURS), 2)
    colours = COLOUR_TABLE.to(draw.device)[two]
    background = texture(draw, kind, direction, colours, CELL * side)
    background = background + noise_of(draw, batch, side)
    cells, ink = empty_cells(draw, batch, side)
    named = two.sort(1).values + ID["red"]
    turns = [
        ("texture", tokens(draw, batch, "texture"), (kind + ID["stripes"])[:, None]),
        ("colour", tokens(draw, batch, "colour"), named),
    ]
    is_straight = kind < 2
    told = torch.where(is_straight, direction + FIRST_GLYPH, ID["nothing"])[:, None]
    turns.append(("direction", tokens(draw, batch, "direction"), told))
    return Scene(cells, ink, background, turns)


def noise_of(draw: Draw, batch: int, side: int) -> Tensor:
    """Return weak noise, as `ground` has it about its mean."""
    values = ground(draw, batch, CELL * side)
    return values - values.mean((2, 3), keepdim=True)


PICTURES: dict[str, Callable[[Draw, int, int], Scene]] = {
    "document": document,
    "table": table,
    "chart": chart,
    "objects": objects,
    "surface": surface,
}


def film(draw: Draw, batch: int, side: int, frames: int) -> tuple[list[Scene], list]:
    """Return scenes, frame by frame, of three shapes that move by a cell, and the questions."""
    shape, colour = draw.distinct(batch, len(SHAPES), 3), draw.below(8, batch, 3)
    move = draw.below(len(MOVES), batch, 3)
    steps = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]], device=draw.device)[move]
    room = side - frames + 1
    start = draw.below(side, batch, 3, 2)
    inner = draw.below(room, batch, 3, 2)
    start = torch.where(steps > 0, inner, torch.where(steps < 0, inner + frames - 1, start))
    background, rows = ground(draw, batch, CELL * side), torch.arange(batch, device=draw.device)
    turns, scenes = [], []
    palette = COLOUR_TABLE.to(draw.device)
    for frame in range(frames):
        cells, ink = empty_cells(draw, batch, side)
        for i in range(3):
            row, column = (start[:, i] + frame * steps[:, i]).unbind(1)
            cells[rows, row, column] = shape[:, i] + FIRST_SHAPE
            ink[rows, row, column] = palette[colour[:, i]]
        scenes.append(Scene(cells, ink, background, []))
    for i in range(3):
        asked = tokens(draw, batch, "moves", shape[:, i] + ID["disc"])
        turns.append(("moves", asked, (move[:, i] + ID["up"])[:, None]))
        asked = tokens(draw, batch, "colour", shape[:, i] + ID["disc"])
        turns.append(("colour", asked, (colour[:, i] + ID["red"])[:, None]))
    return scenes, turns
