"""Pictures and prompts to calibrate any model on: 1/f noise, dead leaves, other generators.

Dead leaves are shapes that cover one another, fewer by the cube of their size. They have edges and
statistics as photographs do (Lee, Mumford and Huang, 2001; for training Baradad et al., 2021).
Nothing is scored: turns have no answers, a calibration takes the model's own.
"""

from random import Random

import numpy as np
from PIL import Image, ImageDraw

from duotone.tasks.synthetic import documents, scenes, sequences
from duotone.tasks.synthetic.sample import Sample, Turn

SIDE = 448
OCTAVES = (2, 4, 8, 16, 32, 64, 128, 256, SIDE)
CONTRAST = 64  # standard deviation of noise, of 256 levels
LEAVES, SMALLEST, LARGEST = 250, 6, 140  # their number and radii
GENERATORS = (documents, scenes, sequences)
# Letters of a script, and how often a word is of it.
SCRIPTS = {
    range(0x61, 0x7B): 10,  # Latin
    range(0x3B1, 0x3CA): 2,  # Greek
    range(0x430, 0x450): 2,  # Cyrillic
    range(0x4E00, 0x9FA6): 2,  # CJK
    range(0x627, 0x63B): 2,  # Arabic
    range(0x30, 0x3A): 2,  # digits
}


def noise(seed: int) -> Image.Image:
    """Return random octaves from 2 to 448 cells wide, whose weights fall by one random factor.

    A factor of 1 is 1/f noise, 0.5 is clouds. Colours are between grey and independent channels.
    """
    rng, draw = Random(seed), np.random.default_rng(seed)
    fall, colour = rng.uniform(0.5, 1.0), rng.random()
    levels = np.zeros((SIDE, SIDE, 3))
    for i, cells in enumerate(OCTAVES):
        levels += fall**i * _octave(draw.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
    levels = colour * levels + (1 - colour) * levels[..., :1]
    levels = 128 + CONTRAST * (levels - levels.mean()) / levels.std()
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def _octave(cells: np.ndarray) -> np.ndarray:
    """Return cells [n, n, 3] as a smooth picture."""
    return np.asarray(_resized(Image.fromarray(cells)), dtype=np.float64)


def _resized(picture: Image.Image) -> Image.Image:
    return picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def leaves(seed: int) -> Image.Image:
    """Return discs, boxes and polygons of any colour over noise, some with a texture of noise."""
    rng = Random(seed)
    picture, texture = noise(rng.getrandbits(32)), noise(rng.getrandbits(32))
    for _ in range(LEAVES):
        radius = SMALLEST / (1 - rng.random() * (1 - (SMALLEST / LARGEST) ** 2)) ** 0.5
        size = max(2, round(2 * radius)), max(2, round(2 * radius * rng.uniform(0.4, 1)))
        x, y = rng.randrange(SIDE) - size[0] // 2, rng.randrange(SIDE) - size[1] // 2
        colour = rng.randrange(256), rng.randrange(256), rng.randrange(256)
        leaf = Image.new("RGB", size, colour)
        if rng.random() < 0.5:
            under = texture.crop((x, y, x + size[0], y + size[1]))
            leaf = Image.blend(leaf, under, rng.uniform(0.2, 0.8))
        picture.paste(leaf, (x, y), _shape(rng, size))
    return picture


def _shape(rng: Random, size: tuple[int, int]) -> Image.Image:
    """Return a mask: a disc, a box, or a polygon of three to five corners."""
    mask = Image.new("L", size, 0)
    draw, whole = ImageDraw.Draw(mask), (0, 0, size[0] - 1, size[1] - 1)
    kind = rng.random()
    if kind < 0.5:
        draw.ellipse(whole, fill=255)
    elif kind < 0.75:
        draw.rectangle(whole, fill=255)
    else:
        corners = [
            (rng.randrange(size[0]), rng.randrange(size[1])) for _ in range(rng.randint(3, 5))
        ]
        draw.polygon(corners, fill=255)
    return mask


def words(rng: Random) -> str:
    """Return 16 to 32 words of 2 to 9 random letters, each of one script, mostly Latin."""
    scripts = rng.choices(list(SCRIPTS), list(SCRIPTS.values()), k=rng.randint(16, 32))
    return " ".join("".join(map(chr, rng.choices(s, k=rng.randint(2, 9)))) for s in scripts)


def generate(seed: int) -> Sample:
    """Return by turns noise and words, leaves and words, a generator's picture and question."""
    rng, number = Random(seed), seed // len(KINDS)
    kind = KINDS[seed % len(KINDS)]
    if kind is not None:
        return Sample([kind(seed)], [Turn(words(rng), (), "words")])
    drawn = GENERATORS[number % len(GENERATORS)].generate(seed)
    question = rng.choice(drawn.turns).question
    return Sample([_resized(drawn.images[0])], [Turn(question, (), "question")])


KINDS = (noise, leaves, None)
