"""Pictures from cells of 16 x 16 pixels, a batch at once, on the device that trains."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .glyphs import CELL, EMPTY, FACES
from .vocabulary import COLOURS, TEXTURES

COLOUR_TABLE = torch.tensor(list(COLOURS.values()))


class Draw:
    """Random numbers of one seed on one device."""

    def __init__(self, seed: int, device: str):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers from 0 to 1."""
        return torch.rand(shape, generator=self.generator, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        """Return numbers of variance one."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def below(self, end: int, *shape: int) -> Tensor:
        """Return integers from 0 to `end` - 1."""
        return torch.randint(end, shape, generator=self.generator, device=self.device)

    def distinct(self, batch: int, end: int, count: int) -> Tensor:
        """Return [batch, count] integers below `end`, no two of a row equal."""
        return self.uniform(batch, end).argsort(1)[:, :count]


@dataclass
class Scene:
    """Pictures before they are drawn, with questions about them.

    cells: [B, R, C], indices into the atlas. ink: [B, R, C, 3]. background: [B, 3, S, S].
    turns: per question its name, the tokens asked [B, Q] and the answer [B, A], padded anywhere.
    """

    cells: Tensor
    ink: Tensor
    background: Tensor
    turns: list[tuple[str, Tensor, Tensor]]


def noise(draw: Draw, batch: int, side: int, strength: Tensor) -> Tensor:
    """Return [B, 3, S, S] of 1/f noise, of a random slope and saturation per picture."""
    total = torch.zeros(batch, 3, side, side, device=draw.device)
    slope = draw.uniform(batch, 1, 1, 1) * 0.7 + 0.3
    colour = draw.uniform(batch, 1, 1, 1)
    for octave, size in enumerate((2, 4, 8, 16, 32, 64, side)):
        values = draw.normal(batch, 1, size, size)
        values = values + colour * draw.normal(batch, 3, size, size)
        grown = F.interpolate(values, (side, side), mode="bilinear", align_corners=False)
        total += grown * slope**octave
    return total * strength.view(-1, 1, 1, 1)


def paper(draw: Draw, batch: int, side: int) -> tuple[Tensor, Tensor]:
    """Return ([B, 3, S, S], ink [B, 3]): light or dark paper, and ink that stands out from it."""
    light = draw.uniform(batch, 1) < 0.6
    shade = draw.uniform(batch, 1) * 0.3
    base = torch.where(light, 1 - shade, shade) + 0.06 * draw.normal(batch, 3)
    ink = torch.where(light, 0.0, 1.0) + torch.where(light, 1, -1) * 0.3 * draw.uniform(batch, 3)
    strength = 0.002 + 0.06 * draw.uniform(batch) ** 2
    return base[..., None, None] + noise(draw, batch, side, strength), ink


def ground(draw: Draw, batch: int, side: int) -> Tensor:
    """Return [B, 3, S, S]: greyish noise on which all colours can be seen."""
    base = 0.35 + 0.35 * draw.uniform(batch, 1, 1, 1) + 0.03 * draw.normal(batch, 3, 1, 1)
    return base + noise(draw, batch, side, 0.005 + 0.05 * draw.uniform(batch))


def texture(draw: Draw, kinds: Tensor, direction: Tensor, two: Tensor, side: int) -> Tensor:
    """Return [B, 3, S, S] in two colours [B, 2, 3]; direction: of 8, over half a turn."""
    batch = len(kinds)
    angle = direction * (torch.pi / 8)
    y, x = torch.meshgrid(*[torch.arange(side, device=draw.device) / CELL] * 2, indexing="ij")
    cos, sin = (part.view(-1, 1, 1) for part in (angle.cos(), angle.sin()))
    along, across = x * cos + y * sin, y * cos - x * sin
    rate = torch.pi * (0.7 + 1.2 * draw.uniform(batch, 1, 1))
    phase = draw.uniform(batch, 2, 1, 1) * 2 * torch.pi
    u, v = (along * rate + phase[:, 0]).sin(), (across * rate + phase[:, 1]).sin()
    blobs = noise(draw, batch, side, torch.full((batch,), 0.6, device=draw.device)).mean(1)
    grain = draw.normal(batch, side, side)
    waves = 0.5 + 0.5 * u
    parts = ((u > 0).float(), waves, (u * v > 0).float(), (u * v > 0.4).float(), (blobs > 0), grain)
    assert len(parts) == len(TEXTURES)
    chosen = torch.stack([part.float() for part in parts], 1)
    mix = chosen[torch.arange(batch, device=draw.device), kinds].clamp(0, 1)[:, None]
    return two[:, 0, :, None, None] * (1 - mix) + two[:, 1, :, None, None] * mix


def render(scene: Scene, atlas: Tensor, draw: Draw) -> Tensor:
    """Return pixels [B, 3, S, S] from -1 to 1: slightly turned, shifted, scaled, with grain."""
    batch, rows, columns = scene.cells.shape
    face = draw.below(len(FACES), batch, 1, 1)
    opacity = atlas[face, scene.cells]  # [B, R, C, 16, 16]
    opacity = opacity * (0.75 + 0.25 * draw.uniform(batch, rows, columns, 1, 1))
    opacity = opacity.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, None]
    ink = scene.ink.permute(0, 3, 1, 2)
    ink = ink.repeat_interleave(CELL, 2).repeat_interleave(CELL, 3)
    turn, scale = 0.03 * draw.normal(batch), 1 + 0.02 * draw.normal(batch)
    move = (draw.uniform(batch, 2, 1) - 0.5) * (5 / (CELL * rows))
    cos, sin = turn.cos() * scale, turn.sin() * scale
    matrix = torch.stack([cos, -sin, sin, cos], 1).view(batch, 2, 2)
    size = [batch, 1, CELL * rows, CELL * columns]
    grid = F.affine_grid(torch.cat([matrix, move], 2), size, align_corners=False)
    opacity = F.grid_sample(opacity, grid, align_corners=False)
    ink = F.grid_sample(ink, grid, mode="nearest", padding_mode="border", align_corners=False)
    grain = draw.normal(*scene.background.shape) * (0.04 * draw.uniform(batch, 1, 1, 1))
    picture = scene.background * (1 - opacity) + ink * opacity + grain
    return picture.clamp(0, 1) * 2 - 1


def empty_cells(draw: Draw, batch: int, side: int) -> tuple[Tensor, Tensor]:
    """Return cells [B, R, C] that show nothing, and black ink for them."""
    cells = torch.full((batch, side, side), EMPTY, device=draw.device)
    return cells, torch.zeros(batch, side, side, 3, device=draw.device)
