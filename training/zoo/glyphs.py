"""The zoo's glyphs: 106 characters in four faces of DejaVu, drawn once, and shapes by formula.

    python -m training.zoo.glyphs

writes glyphs.png, so that the machine that trains needs no fonts.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from .vocabulary import DIGITS, SCRIPTS, SHAPES

CELL = 16
FACES = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono")
CHARACTERS = DIGITS + "".join(SCRIPTS.values())
FILE = Path(__file__).with_name("glyphs.png")
FONTS = Path("/usr/share/fonts/truetype/dejavu")
# Cells beside characters and shapes: a bar, its upper end, nothing.
FULL = len(CHARACTERS) + len(SHAPES)
HALF, EMPTY = FULL + 1, FULL + 2


def draw_characters() -> None:
    """Write a row of cells per face."""
    sheet = Image.new("L", (CELL * len(CHARACTERS), CELL * len(FACES)))
    pen = ImageDraw.Draw(sheet)
    for row, face in enumerate(FACES):
        font = ImageFont.truetype(FONTS / f"{face}.ttf", 14)
        for column, character in enumerate(CHARACTERS):
            centre = (CELL * column + CELL // 2, CELL * row + CELL // 2)
            pen.text(centre, character, fill=255, font=font, anchor="mm")
    sheet.save(FILE, optimize=True)


def _shapes() -> Tensor:
    """Return [shapes, 16, 16], in the order of `SHAPES`."""
    y, x = torch.meshgrid(*[(torch.arange(CELL) - 7.5) / 7] * 2, indexing="ij")
    radius, ax, ay = (x**2 + y**2).sqrt(), x.abs(), y.abs()
    inside = [
        radius < 0.95,
        torch.maximum(ax, ay) < 0.82,
        (ay < 0.9) & (ax < 0.5 * (y + 0.95)),
        (radius < 0.98) & (radius > 0.55),
        (torch.minimum(ax, ay) < 0.28) & (torch.maximum(ax, ay) < 0.95),
        ax + ay < 0.98,
    ]
    return torch.stack(inside).float()


def load_atlas(device: str) -> Tensor:
    """Return opacities [faces, cells, 16, 16]: characters, shapes, a bar, its end, nothing."""
    sheet = torch.from_numpy(np.asarray(Image.open(FILE)).copy()).float() / 255
    sheet = sheet.unflatten(0, (-1, CELL)).unflatten(2, (-1, CELL)).transpose(1, 2)
    others = torch.zeros(3, CELL, CELL)
    others[0, :, 2:-2] = 1
    others[1, CELL // 2 :, 2:-2] = 1
    others = torch.cat([_shapes(), others]).expand(len(FACES), -1, -1, -1)
    return torch.cat([sheet, others], 1).to(device)


if __name__ == "__main__":
    draw_characters()
