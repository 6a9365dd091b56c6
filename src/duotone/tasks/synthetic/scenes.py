"""Pictures of two to five objects, described in words.

Each object has a shape, colour, size, pattern and place; no two share shape and colour, and none
overlap. A picture comes with several reference captions from a small grammar, in the manner of
COCO. Each picture also has questions whose answers are read off the picture.
"""

from dataclasses import dataclass
from itertools import pairwise
from random import Random

from duotone.tasks.synthetic.drawing import (
    COLOURS,
    SHAPES,
    SIZE,
    STYLES,
    TONES,
    add_noise,
    background,
    draw_shape,
    jitter,
)
from duotone.tasks.synthetic.sample import Mark, Sample, Turn, join, with_article

CAPTION_QUESTION = "Describe the picture."
NUMBERS = ("zero", "one", "two", "three", "four", "five")
PATTERNS = ("plain", "plain", "striped", "dotted")
RADII = {"small": (15, 21), "big": (29, 37)}
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")


@dataclass(frozen=True)
class Thing:
    """One object of a scene, in words and in pixels."""

    shape: str
    colour: str
    pattern: str
    size: str
    radius: int
    x: int
    y: int

    @property
    def name(self) -> str:
        """Colour and shape: together they identify the object in its scene."""
        return f"{self.colour} {self.shape}"

    @property
    def phrase(self) -> str:
        """All attributes, as in `big striped red star`."""
        pattern = "" if self.pattern == "plain" else f"{self.pattern} "
        return f"{self.size} {pattern}{self.name}"


def place_name(x: float, y: float) -> str:
    """Name the cell of a 3 x 3 grid that a point falls in."""
    row, column = ROWS[int(3 * y / SIZE)], COLUMNS[int(3 * x / SIZE)]
    if row == "middle":
        return column
    return row if column == "center" else f"{row} {column}"


def is_clear_place(x: float, y: float, margin: int = 7) -> bool:
    """True if a point lies well inside its grid cell."""
    borders = (SIZE / 3, SIZE / 1.5)
    return all(abs(value - border) > margin for value in (x, y) for border in borders)


def _fits(thing: Thing, others: list[Thing]) -> bool:
    """True without overlap, ambiguous left-to-right order, or a second object of the same name."""
    for other in others:
        gap = thing.radius + other.radius + 4
        if (thing.x - other.x) ** 2 + (thing.y - other.y) ** 2 < gap**2:
            return False
        if abs(thing.x - other.x) < 10 or thing.name == other.name:
            return False
    return True


def _random_thing(rng: Random) -> Thing:
    size = rng.choice(("small", "big"))
    radius = rng.randint(*RADII[size])
    x, y = (rng.randint(radius + 2, SIZE - radius - 3) for _ in range(2))
    shape, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
    return Thing(shape, colour, rng.choice(PATTERNS), size, radius, x, y)


def _random_things(rng: Random) -> list[Thing]:
    """Draw objects until the scene has as many as planned; return them from left to right."""
    wanted = rng.randint(2, 5)
    things: list[Thing] = []
    while len(things) < wanted:
        thing = _random_thing(rng)
        if _fits(thing, things):
            things.append(thing)
    return sorted(things, key=lambda thing: thing.x)


def _captions(things: list[Thing], ground: str, rng: Random) -> tuple[str, ...]:
    """Return seven descriptions of one scene, objects always from left to right."""
    full = join([with_article(thing.phrase) for thing in things])
    short = join([with_article(thing.name) for thing in things])
    placed = join([f"{with_article(t.name)} at the {place_name(t.x, t.y)}" for t in things])
    bare = join([thing.phrase for thing in things])
    count = NUMBERS[len(things)]
    opening = rng.choice(("The picture shows", "We see", "There is"))
    first, last = things[0], things[-1]
    sentences = (
        f"{full} on a {ground}.",
        f"{opening} {short} on a {ground}.",
        f"There are {count} objects: {full}.",
        f"From left to right: {bare}.",
        f"{placed} of the picture.",
        f"A {ground} with {count} objects: {short}.",
        f"{count} objects from {with_article(first.phrase)} on the left to "
        f"{with_article(last.phrase)} on the right: {short}.",
    )
    return tuple(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _unique(things: list[Thing], attribute: str) -> list[Thing]:
    """Return the things whose attribute no other thing shares."""
    values = [getattr(thing, attribute) for thing in things]
    return [t for t, value in zip(things, values, strict=True) if values.count(value) == 1]


def _attribute_turns(things: list[Thing]) -> list[Turn]:
    turns = [
        Turn(f"What colour is the {t.shape}?", (t.colour,), "colour")
        for t in _unique(things, "shape")
    ]
    turns += [
        Turn(f"What shape is the {t.colour} object?", (t.shape,), "shape")
        for t in _unique(things, "colour")
    ]
    turns += [Turn(f"What pattern has the {t.name}?", (t.pattern,), "pattern") for t in things]
    turns += [Turn(f"What size is the {t.name}?", (t.size,), "size") for t in things]
    return turns


def _place_turns(things: list[Thing]) -> list[Turn]:
    """Make questions about positions, absolute and relative to neighbours."""
    turns = [
        Turn(f"Where is the {t.name}?", (place_name(t.x, t.y),), "place")
        for t in things
        if is_clear_place(t.x, t.y)
    ]
    for left, right in pairwise(things):
        turns += [
            Turn(f"What is next to the left of the {right.name}?", (left.name,), "relation"),
            Turn(f"What is next to the right of the {left.name}?", (right.name,), "relation"),
        ]
    return turns


def _scene_turns(things: list[Thing], ground: str) -> list[Turn]:
    return [
        Turn("How many objects are there?", (str(len(things)), NUMBERS[len(things)]), "count"),
        Turn("What is the background?", (ground,), "background"),
        Turn("What is the leftmost object?", (things[0].name,), "relation"),
        Turn("What is the rightmost object?", (things[-1].name,), "relation"),
    ]


def _questions(things: list[Thing], ground: str, rng: Random) -> list[Turn]:
    """Return six questions, at most two of a kind."""
    turns = _attribute_turns(things) + _place_turns(things) + _scene_turns(things, ground)
    rng.shuffle(turns)
    chosen: list[Turn] = []
    for turn in turns:
        if sum(other.kind == turn.kind for other in chosen) < 2:
            chosen.append(turn)
    return chosen[:6]


def generate(seed: int) -> Sample:
    """Return the scene of one seed: a picture, its captions (first turn) and six questions."""
    rng = Random(seed)
    tone, style = rng.choice(tuple(TONES)), rng.choice(STYLES)
    ground = f"{style} {tone} background"
    picture = background(tone, style, rng)
    things = _random_things(rng)
    for t in things:
        colour = jitter(COLOURS[t.colour], rng, 10)
        draw_shape(picture, t.shape, colour, (t.x, t.y), t.radius, t.pattern)
    picture = add_noise(picture, rng)
    caption = Turn(CAPTION_QUESTION, _captions(things, ground, rng), "caption")
    names = frozenset(thing.name for thing in things)
    marks = [
        Mark(label, t.x, t.y, t.radius)
        for t in things
        for label in (t.shape, t.colour, t.pattern, t.size)
    ]
    return Sample([picture], [caption, *_questions(things, ground, rng)], names, marks)
