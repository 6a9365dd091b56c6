"""Receipts, forms, tables, letters, tickets and signs with random contents, and questions.

Six layouts share one page description: strings with a position and a size. The last turn requests
the whole text in reading order. Training puts this turn after the other questions, to teach a model
to read. This turn is not meant for scoring.
"""

import math
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from duotone.tasks.synthetic.drawing import SIZE, add_noise, advance, ascent, bitmap_font, font
from duotone.tasks.synthetic.fields import (
    GOODS,
    Entry,
    amount,
    code,
    entries,
    number,
    person,
    surname,
)
from duotone.tasks.synthetic.sample import Mark, Sample, Turn

TRANSCRIPT_QUESTION = "Read the text."
PAPERS = ((255, 255, 255), (250, 245, 228), (238, 244, 250), (246, 236, 238), (236, 246, 236))
INKS = ((15, 15, 20), (20, 30, 100), (90, 25, 25), (20, 70, 40), (60, 60, 66))
MARGIN = 8


@dataclass(frozen=True)
class Style:
    """Style of one page: colours, letter size, bold or not, typeface."""

    paper: tuple[int, int, int]
    ink: tuple[int, int, int]
    size: int
    is_bold: bool
    is_bitmap: bool


class Page:
    """A sheet of paper that remembers in which order it was written on."""

    def __init__(self, style: Style):
        self.style = style
        self.picture = Image.new("RGB", (SIZE, SIZE), style.paper)
        self.pen = ImageDraw.Draw(self.picture)
        self.words: list[str] = []
        self.marks: list[Mark] = []

    def width(self, text: str, size: int) -> float:
        """Return the length of a text in pixels."""
        if self.style.is_bitmap:
            return bitmap_font().getlength(text)
        return font(size).getlength(text) + self.style.is_bold

    def write(self, x: float, y: float, text: str, size: int = 0, align: str = "left") -> float:
        """Write at a position, never over the right margin; return the end of the text."""
        size = size or self.style.size
        while self.width(text, size) > SIZE - 2 * MARGIN:
            size -= 1
        width = self.width(text, size)
        x -= {"left": 0, "center": width / 2, "right": width}[align]
        x = max(2, min(x, SIZE - MARGIN - width))
        if self.style.is_bitmap:
            self.pen.text((x, y), text, self.style.ink, bitmap_font())
        else:
            for i in range(1 + self.style.is_bold):
                self.pen.text((x + i, y), text, self.style.ink, font(size))
        self.words.append(text)
        self._mark(x, y, text, size)
        return x + width

    def _mark(self, x: float, y: float, text: str, size: int) -> None:
        """Note the position of every letter, at half the height of a small letter."""
        size = 0 if self.style.is_bitmap else size
        y += ascent(size) - 4
        for letter in text:
            step = advance(letter, size)
            if letter != " ":
                self.marks.append(Mark(letter, x + step / 2, y))
            x += step

    def rule(self, *corners: float) -> None:
        """Draw a line or, with an even number of further corners, a path."""
        self.pen.line(corners, fill=self.style.ink)


def _question_turns(written: list[Entry]) -> list[Turn]:
    return [Turn(entry.question, (entry.value,), "field") for entry in written]


def form(page: Page, rng: Random) -> list[Turn]:
    """Label and value on a line, the values in a column or right after their labels."""
    written = entries(rng, rng.randint(4, 8))
    title = f"{surname(rng)} {rng.choice(('Form', 'Ltd', 'Invoice'))}"
    page.write(SIZE / 2, 6, title, 16, "center")
    pitch = min(34.0, 220 / len(written))
    column = rng.choice((0, 100, 110))
    mark = rng.choice(("", ":"))
    for i, entry in enumerate(written):
        y = 32 + i * pitch
        end = page.write(MARGIN, y, entry.label + mark)
        page.write(max(column, end + 8), y, entry.value)
        if column == 100:
            page.rule(column, y + pitch - 4, SIZE - MARGIN, y + pitch - 4)
    return _question_turns(written)


def receipt(page: Page, rng: Random) -> list[Turn]:
    """A shop's name, goods with prices at the right edge, a total, a few entries."""
    goods = rng.sample(GOODS, rng.randint(2, 4))
    prices = [amount(rng) for _ in goods]
    extra = entries(rng, rng.randint(2, 3))
    page.write(SIZE / 2, 4, f"{surname(rng)} Shop", 17, "center")
    lines = [(f"{rng.randint(1, 9)} {g}", p) for g, p in zip(goods, prices, strict=True)]
    lines += [(entry.label, entry.value) for entry in extra]
    pitch = 218 / len(lines)
    for i, (left, right) in enumerate(lines):
        y = 30 + i * min(30.0, pitch)
        page.write(MARGIN, y, left)
        page.write(SIZE - MARGIN, y, right, align="right")
        if i == len(goods) - 1:
            page.rule(MARGIN, y + min(30.0, pitch) - 4, SIZE - MARGIN, y + min(30.0, pitch) - 4)
    costs = [
        Turn(f"How much is the {g}?", (p,), "field") for g, p in zip(goods, prices, strict=True)
    ]
    return costs + _question_turns(extra)


COLUMNS = (
    ("code", "Code", code),
    ("price", "Price", amount),
    ("room", "Room", lambda rng: number(rng, 3)),
    ("stock", "Stock", lambda rng: number(rng, rng.randint(1, 4))),
)


def table(page: Page, rng: Random) -> list[Turn]:
    """Rows of names, two columns of values: a row and a column identify a cell."""
    names = [surname(rng) for _ in range(rng.randint(3, 6))]
    columns = rng.sample(COLUMNS, 2)
    pitch = min(34.0, 225 / (len(names) + 1))
    lines = (MARGIN, 104, 180)
    turns = []
    for x, title in zip(lines, ("Name", columns[0][1], columns[1][1]), strict=True):
        page.write(x, 10, title)
    for i, name in enumerate(names):
        y = 10 + (i + 1) * pitch
        page.rule(4, y - 4, SIZE - 4, y - 4)
        page.write(lines[0], y, name)
        for x, (noun, _, value) in zip(lines[1:], columns, strict=True):
            text = value(rng)
            page.write(x, y, text)
            turns.append(Turn(f"What is the {noun} of {name}?", (text,), "field"))
    if rng.random() < 0.5:
        for x in lines[1:]:
            page.rule(x - 6, 6, x - 6, 10 + (len(names) + 1) * pitch - 4)
    return turns


def letter(page: Page, rng: Random) -> list[Turn]:
    """Running text, broken into lines where the page ends."""
    written = entries(rng, rng.randint(3, 5))
    reader = person(rng)
    page.write(MARGIN, 8, f"Dear {reader},")
    links = rng.sample(("the", "your", "our", "and the", "with the", "also the"), 6)
    words = " ".join(
        f"{link} {entry.label.lower()} is {entry.value}{rng.choice(',.')}"
        for link, entry in zip(links, written, strict=False)
    ).split()
    y, pitch, line = 34, page.style.size + 7, ""
    for word in words:
        if page.width(f"{line} {word}", page.style.size) > SIZE - 2 * MARGIN:
            page.write(MARGIN, y, line)
            y, line = y + pitch, word
        else:
            line = f"{line} {word}".strip()
    page.write(MARGIN, y, line)
    page.write(MARGIN, y + pitch + 4, f"Yours, {person(rng)}")
    return [Turn("Who is the reader?", (reader,), "field"), *_question_turns(written)]


def ticket(page: Page, rng: Random) -> list[Turn]:
    """A grid of cells, each a small label above a large value."""
    written = entries(rng, rng.choice((4, 6)))
    rows = len(written) // 2
    height = 236 / rows
    for i, entry in enumerate(written):
        x, y = 6 + 122 * (i % 2), 8 + height * (i // 2)
        page.rule(x, y, x + 120, y, x + 120, y + height - 6, x, y + height - 6, x, y)
        page.write(x + 5, y + 4, entry.label, 13)
        size = page.style.size + 3
        while page.width(entry.value, size) > 110:
            size -= 1
        page.write(x + 5, y + 24, entry.value, size)
    return _question_turns(written)


def sign(page: Page, rng: Random) -> list[Turn]:
    """Few entries in large letters, each below its label."""
    written = entries(rng, rng.randint(2, 4))
    size, pitch = rng.randint(19, 26), 240 / len(written)
    x, align = rng.choice(((MARGIN, "left"), (SIZE / 2, "center")))
    for i, entry in enumerate(written):
        y = 8 + i * pitch
        page.write(x, y, entry.label, 15, align)
        page.write(x, y + 19, entry.value, size, align)
    return _question_turns(written)


LAYOUTS = (form, receipt, table, letter, ticket, sign)


def _random_style(rng: Random) -> Style:
    """Style with mostly the outline font between 12 and 17 pixels, sometimes the typewriter."""
    ink, size = rng.choice(INKS), rng.randint(12, 17)
    is_bold = size >= 14 and rng.random() < 0.15
    return Style(rng.choice(PAPERS), ink, size, is_bold, rng.random() < 0.15)


def _rotated(mark: Mark, angle: float) -> Mark:
    """Move a mark as `Image.rotate` moves its place."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    x, y = mark.x - SIZE / 2, mark.y - SIZE / 2
    return Mark(mark.label, SIZE / 2 + cos * x + sin * y, SIZE / 2 - sin * x + cos * y)


def _scan(page: Page, rng: Random) -> tuple[Image.Image, list[Mark]]:
    """Tilt some pages a little and add noise to all; return the picture and its marks."""
    picture, marks = page.picture, page.marks
    if rng.random() < 0.4:
        angle = rng.uniform(-1.5, 1.5)
        picture = picture.rotate(angle, Image.Resampling.BILINEAR, fillcolor=page.style.paper)
        marks = [_rotated(mark, angle) for mark in marks]
    return add_noise(picture, rng), marks


def generate(seed: int) -> Sample:
    """Return the document of one seed, its questions in random order, its transcript last."""
    rng = Random(seed)
    page = Page(_random_style(rng))
    turns = rng.choice(LAYOUTS)(page, rng)
    rng.shuffle(turns)
    text = "\n".join(page.words)
    transcript = Turn(TRANSCRIPT_QUESTION, (text,), "transcript")
    picture, marks = _scan(page, rng)
    return Sample([picture], [*turns[:8], transcript], marks=marks)
