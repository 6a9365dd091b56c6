"""Shapes, fills, backgrounds and paper, drawn with PIL alone.

Training renders thousands of pictures a second. So everything that does not depend on the seed
(anti-aliased masks, textures, noise, fonts) is made once per process and cached. All randomness
comes from the caller's generator: the same seed gives the same bytes.
"""

import math
from functools import lru_cache
from random import Random

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

SIZE = 256
SUPERSAMPLING = 4
OUTLINE = (45, 45, 50)

COLOURS = {
    "red": (214, 38, 40),
    "orange": (250, 140, 20),
    "yellow": (245, 220, 40),
    "green": (40, 150, 60),
    "blue": (40, 80, 210),
    "purple": (130, 50, 170),
    "pink": (250, 150, 190),
    "brown": (125, 75, 40),
    "black": (30, 30, 32),
    "white": (250, 250, 250),
}
TONES = {
    "gray": (186, 188, 190),
    "beige": (226, 208, 172),
    "mint": (176, 222, 196),
    "lilac": (206, 190, 226),
    "sky": (168, 206, 236),
}
STYLES = ("plain", "checkered", "striped", "dotted", "shaded")


def _radial(radii: list[float], turn: float = -0.25) -> list[tuple[float, float]]:
    """Return the polygon whose corner i lies at radius `radii[i]`, in equal angular steps."""
    angles = [2 * math.pi * (i / len(radii) + turn) for i in range(len(radii))]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


def _heart() -> list[tuple[float, float]]:
    """Return the usual parametric heart, scaled to the unit circle."""
    points = []
    for i in range(40):
        t = 2 * math.pi * i / 40
        wave = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((16 * math.sin(t) ** 3 / 17, -wave / 17))
    return points


POLYGONS = {
    "circle": _radial([0.95] * 48),
    "ring": _radial([0.95] * 48),
    "moon": _radial([0.95] * 48),
    "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "triangle": [(0.0, -0.95), (0.95, 0.8), (-0.95, 0.8)],
    "star": _radial([1.0, 0.42] * 5),
    "heart": _heart(),
    "diamond": [(0.0, -1.0), (0.65, 0.0), (0.0, 1.0), (-0.65, 0.0)],
    "hexagon": _radial([0.95] * 6, 0.0),
    "cross": [
        (-0.3, -0.95), (0.3, -0.95), (0.3, -0.3), (0.95, -0.3), (0.95, 0.3), (0.3, 0.3),
        (0.3, 0.95), (-0.3, 0.95), (-0.3, 0.3), (-0.95, 0.3), (-0.95, -0.3), (-0.3, -0.3),
    ],
    "arrow": [
        (-0.95, -0.28), (0.1, -0.28), (0.1, -0.75), (0.98, 0.0), (0.1, 0.75), (0.1, 0.28),
        (-0.95, 0.28),
    ],
    "house": [(0.0, -0.95), (0.95, -0.1), (0.7, -0.1), (0.7, 0.85), (-0.7, 0.85), (-0.7, -0.1),
              (-0.95, -0.1)],
}  # fmt: skip
SHAPES = tuple(POLYGONS)
HOLES = {"ring": (0.0, 0.0, 0.5), "moon": (0.5, -0.2, 0.75)}


@lru_cache(maxsize=4096)
def _masks(shape: str, radius: int) -> tuple[Image.Image, Image.Image]:
    """Return the filled mask and the outline mask of a shape, both `2 radius + 1` wide."""
    side = (2 * radius + 1) * SUPERSAMPLING
    middle, scale = side / 2, radius * SUPERSAMPLING
    fill = Image.new("L", (side, side), 0)
    pen = ImageDraw.Draw(fill)
    pen.polygon([(middle + x * scale, middle + y * scale) for x, y in POLYGONS[shape]], fill=255)
    if shape in HOLES:
        x, y, r = (value * scale for value in HOLES[shape])
        pen.ellipse([middle + x - r, middle + y - r, middle + x + r, middle + y + r], fill=0)
    small = (2 * radius + 1, 2 * radius + 1)
    fill = fill.resize(small, Image.Resampling.BOX)
    edge = _edge(fill)
    return fill, edge


def _edge(fill: Image.Image) -> Image.Image:
    """Return a one-pixel rim: the pixels that a 3 x 3 erosion takes off the mask."""
    cells = np.pad(np.asarray(fill), 1)
    height, width = cells.shape
    windows = [cells[dy : height - 2 + dy, dx : width - 2 + dx] for dy, dx in np.ndindex(3, 3)]
    return Image.fromarray(cells[1:-1, 1:-1] - np.minimum.reduce(windows))


@lru_cache(maxsize=64)
def texture(style: str, period: int, side: int = SIZE) -> Image.Image:
    """Return a repeating mask: 255 where the second colour of a fill or background shows."""
    y, x = np.mgrid[0:side, 0:side]
    if style == "checkered":
        cells = (x // period + y // period) % 2
    elif style == "striped":
        cells = (x + y) // period % 2
    elif style == "dotted":
        half = period - 0.5
        cells = np.hypot(x % (2 * period) - half, y % (2 * period) - half) < 0.6 * period
    elif style == "shaded":
        cells = (x + period * y) / ((1 + period) * side)
    else:
        cells = np.zeros((side, side))
    return Image.fromarray((cells * 255).astype(np.uint8))


@lru_cache(maxsize=1)
def _noise_bank() -> list[Image.Image]:
    """Return fixed noise pictures; adding one costs a tenth of drawing fresh noise."""
    draw = np.random.default_rng(0)
    return [
        Image.fromarray(draw.normal(16, level, (SIZE, SIZE, 3)).clip(0, 32).astype(np.uint8))
        for level in (2, 3, 4, 5, 6, 7)
    ]


def jitter(colour: tuple[int, ...], rng: Random, amount: int) -> tuple[int, ...]:
    """Move each channel by at most `amount`."""
    return tuple(min(255, max(0, c + rng.randint(-amount, amount))) for c in colour)


def shift(colour: tuple[int, ...], amount: int) -> tuple[int, ...]:
    """Lighten dark colours and darken light ones."""
    sign = -1 if sum(colour) > 330 else 1
    return tuple(min(255, max(0, c + sign * amount)) for c in colour)


def background(tone: str, style: str, rng: Random) -> Image.Image:
    """Return a textured square with a little clutter on it."""
    first = jitter(TONES[tone], rng, 8)
    period = rng.randint(0, 3) if style == "shaded" else rng.randint(7, 16)
    second = shift(first, 60 if style == "shaded" else 26)
    picture = Image.new("RGB", (SIZE, SIZE), first)
    if style != "plain":
        picture.paste(second, None, texture(style, period))
    pen = ImageDraw.Draw(picture)
    for _ in range(rng.randint(0, 14)):
        x, y = rng.randrange(SIZE), rng.randrange(SIZE)
        pen.line([x, y, x + rng.randint(-5, 5), y + rng.randint(-5, 5)], fill=shift(first, 50))
    return picture


def add_noise(picture: Image.Image, rng: Random) -> Image.Image:
    """Add sensor-like noise around zero."""
    noise = ImageChops.offset(rng.choice(_noise_bank()), rng.randrange(SIZE), rng.randrange(SIZE))
    return ImageChops.add(picture, noise, 1.0, -16)


def draw_shape(
    picture: Image.Image,
    shape: str,
    colour: tuple[int, ...],
    centre: tuple[int, int],
    radius: int,
    pattern: str = "plain",
) -> None:
    """Paint one outlined shape, plain, striped or dotted, in place."""
    fill, edge = _masks(shape, radius)
    corner = (centre[0] - radius, centre[1] - radius)
    picture.paste(colour, corner, fill)
    if pattern != "plain":
        spots = texture(pattern, 4 if pattern == "dotted" else 5, 128).crop((0, 0, *fill.size))
        picture.paste(shift(colour, 95), corner, ImageChops.multiply(fill, spots))
    picture.paste(OUTLINE, corner, edge)


@lru_cache(maxsize=64)
def font(size: int) -> ImageFont.FreeTypeFont:
    """Return Pillow's own font, so every machine draws the same letters."""
    return ImageFont.load_default(size)


@lru_cache(maxsize=1)
def bitmap_font() -> ImageFont.ImageFont:
    """Return Pillow's typewriter bitmap font."""
    return ImageFont.load_default_imagefont()


@lru_cache(maxsize=4096)
def advance(letter: str, size: int) -> float:
    """Return the pen's advance for a letter; size 0 is the bitmap font."""
    return (font(size) if size else bitmap_font()).getlength(letter)


@lru_cache(maxsize=64)
def ascent(size: int) -> float:
    """Return the distance from the top of a line to its base line; size 0 is the bitmap font."""
    return font(size).getmetrics()[0] if size else 9.0
