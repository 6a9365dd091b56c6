"""Transform coding: a basis per tensor from its statistics, and widths for all channels of a model.

Pure functions of covariances; nothing here knows models or files.

A vector x with covariance S costs `dx^T M dx` if its decoded value is off by dx (M is the metric).
With C a regularized M (see `klt`) and A = C^(1/2), coefficients c = x E with E = A U have

    |dc|^2 = dx^T C dx        their errors count alike
    cov(c) = U^T A S A U = diag(spectrum)        and they are uncorrelated

so widths follow from the spectrum alone (reverse water-filling).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Matrices = Float[Tensor, "*b channels channels"]
Channels = Float[Tensor, "*b channels"]
# (layer, "key" or "value", policy: "visual", "background" or "text").
Name = tuple[int, str, str]
Classes = tuple[tuple[int, float], ...]

WIDTHS = (0, 1, 2, 4)
# Squared error of Lloyd-Max levels for unit variance (J. Max, 1960; 8 bits iterated).
GAUSSIAN = {0: 1.0, 1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 8: 4.1e-5}
# C may not have eigenvalues below this share of its mean one: E has to have an inverse.
SMALLEST = 1e-6
# Of a channel's size to the median: from here on it is an outlier, and the smallest unit's inverse.
FAR, FARTHEST = 4.0, 256.0
TINY = 1e-30


def klt(
    covariance: Matrices,
    metric: Matrices,
    regularization: float,
    units: Channels | None = None,
) -> tuple[Channels, Matrices]:
    """(spectrum, falling; E) of covariances S in metrics M, in float64.

    C = (M + regularization m D) / (1 + regularization) with m the level of M (`level_of`). D is the
    identity, or diagonal with the squares of `units` over their mean. A metric of zeros counts as
    D. The more regularization, the closer E comes to an orthogonal matrix of channels in these
    units. The inverse of E is U^T A^-1. Of few tokens S has no full rank; the spectrum then ends in
    zeros, and E is regular all the same.
    """
    covariance, metric = _symmetric(covariance), _symmetric(metric)
    floor = torch.diag_embed(_squares(metric, units))
    level = level_of(metric, units)[..., None, None]
    metric = torch.where(level > 0, metric, floor)
    level = torch.where(level > 0, level, torch.ones_like(level))
    root = _root((metric + regularization * level * floor) / (1 + regularization))
    spectrum, vectors = torch.linalg.eigh(_symmetric(root @ covariance @ root))
    return spectrum.flip(-1).clamp(min=0), root @ vectors.flip(-1)


def level_of(metric: Matrices, units: Channels | None = None) -> Float[Tensor, "*b"]:
    """Mean cost of an error of one unit in a channel."""
    return (metric.diagonal(dim1=-2, dim2=-1) / _squares(metric, units)).mean(-1)


def outliers(sizes: Channels) -> Channels:
    """Units of channels: sizes over a head's median where they are far from it, else 1.

    A model may have large K and V in a few channels, and small weights that read these. Orthogonal
    bases would spend bits on them.
    """
    ratio = sizes / sizes.median(-1, keepdim=True).values.clamp_min(TINY)
    return torch.where((ratio > FAR) | (ratio * FAR < 1), ratio, 1.0).clamp_min(1 / FARTHEST)


def _squares(metric: Matrices, units: Channels | None) -> Channels:
    if units is None:
        return torch.ones_like(metric.diagonal(dim1=-2, dim2=-1))
    squares = units.to(metric).square()
    return squares / squares.mean(-1, keepdim=True)


def _symmetric(matrix: Matrices) -> Matrices:
    """Float64, and exactly symmetric, which sums in another order need not be."""
    matrix = matrix.double()
    return (matrix + matrix.transpose(-1, -2)) / 2


def _root(matrix: Matrices) -> Matrices:
    """The symmetric square root of positive semidefinite matrices, made regular."""
    values, vectors = torch.linalg.eigh(matrix)
    values = torch.maximum(values, SMALLEST * values.mean(-1, keepdim=True))
    return vectors * values.sqrt()[..., None, :] @ vectors.transpose(-1, -2)


@dataclass
class _Filling:
    """Widths of all units while bits are handed out.

    energy: [tensors, units] mean variance of a unit's channels times its tensor's weight, falling;
    share: [tensors] of the tokens; sizes: [units] channels; place: [tensors, units] index of the
    unit's width in widths; left: bits to hand out, per token.
    """

    energy: Tensor
    share: Tensor
    sizes: Tensor
    widths: Tensor
    distortion: Tensor
    place: Tensor
    left: float

    def step(self) -> bool:
        """Widen the unit that pays most per bit; False where none can be paid or none pays."""
        rates, costs = self._moves()
        best = int(rates.argmax())
        if rates.flatten()[best] <= 0:
            return False
        tensor, unit, width = torch.unravel_index(torch.tensor(best), rates.shape)
        self.left -= float(costs.flatten()[best])
        self.place[tensor, unit] = width
        return True

    def _moves(self) -> tuple[Tensor, Tensor]:
        """(error per bit, bits) [tensors, units, widths] of giving a unit a width.

        All wider widths are tried, not only the next. Where errors are not convex in bits, a jump
        can pay although its first half does not. No unit overtakes one of larger variance, since a
        block gives its widest codes to its largest channels.
        """
        sizes = (self.share[:, None] * self.sizes)[..., None]
        costs = sizes * (self.widths - self.widths[self.place][..., None])
        saved = self.distortion[self.place][..., None] - self.distortion
        saved = saved * self.energy[..., None] * sizes
        before = torch.cat([torch.full_like(self.place[:, :1], len(self.widths)), self.place], 1)
        indices = torch.arange(len(self.widths))
        open_to = (indices > self.place[..., None]) & (indices <= before[:, :-1, None])
        allowed = open_to & (costs <= self.left + 1e-9)
        return torch.where(allowed, saved / torch.where(allowed, costs, 1.0), 0.0), costs


def least_bits(channels: int) -> float:
    """Fewest bits per number of `allocate`: a unit of every tensor has codes."""
    return WIDTHS[1] * unit_sizes(channels)[0] / channels


def allocate(
    spectra: Mapping[Name, Float[Tensor, " channels"]],
    mean_bits: float,
    weights: Mapping[Name, float] | None = None,
    shares: Mapping[Name, float] | None = None,
) -> dict[Name, Classes]:
    """{name: classes of a TensorSpec} spending `mean_bits` per number where they save most.

    spectra: of each tensor, falling, a mean over its kv heads, in one metric of errors. Bits move
    between layers, between K and V and between parts.
    weights: factors of errors; shares: of the tokens that a tensor has; both 1 by default.
    The first unit of every tensor gets the smallest width beyond 0: no classes are no TensorSpec.
    Errors: ValueError for a budget below that floor.
    """
    channels = _channels(spectra)
    sizes = unit_sizes(channels)
    floor = least_bits(channels)
    if not floor <= mean_bits <= WIDTHS[-1]:
        raise ValueError(
            f"bits per channel must lie in [{floor:g}, {WIDTHS[-1]}]: {sizes[0]} channels of every "
            f"tensor get {WIDTHS[1]} bits, none gets more than {WIDTHS[-1]}; got {mean_bits:g}"
        )
    filling = _filling(spectra, sizes, weights or {}, shares or {})
    filling.left = (mean_bits - floor) * channels * float(filling.share.sum())
    while filling.step():
        pass
    rows = filling.widths[filling.place].tolist()
    return {name: _classes(row, sizes) for name, row in zip(spectra, rows, strict=True)}


def unit_sizes(channels: int) -> list[int]:
    """Channels of every unit, which get a width together; the last one may have fewer."""
    unit = max(4, channels // 8)
    return [min(unit, channels - start) for start in range(0, channels, unit)]


def _channels(spectra: Mapping[Name, Tensor]) -> int:
    sizes = {len(spectrum) for spectrum in spectra.values()}
    if len(sizes) != 1:
        raise ValueError(f"spectra must be given, all of one length; got lengths {sorted(sizes)}")
    return sizes.pop()


def _filling(
    spectra: Mapping[Name, Tensor],
    sizes: Sequence[int],
    weights: Mapping[Name, float],
    shares: Mapping[Name, float],
) -> _Filling:
    """All at 0 bits but for the first units."""
    rows = [weights.get(name, 1.0) * _unit_means(s, sizes) for name, s in spectra.items()]
    share = torch.tensor([shares.get(name, 1.0) for name in spectra], dtype=torch.float64)
    place = torch.zeros(len(rows), len(sizes), dtype=torch.long)
    place[:, 0] = 1
    tables = (list(sizes), list(WIDTHS), [GAUSSIAN[bits] for bits in WIDTHS])
    channels, widths, errors = (torch.tensor(t, dtype=torch.float64) for t in tables)
    return _Filling(torch.stack(rows), share, channels, widths, errors, place, 0.0)


def _unit_means(spectrum: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.stack([part.mean() for part in spectrum.double().cpu().split(list(sizes))])


def _classes(widths: Sequence[float], sizes: Sequence[int]) -> Classes:
    """Shares of whole channels, the widest first; remaining channels have 0 bits."""
    counts: dict[int, int] = {}
    for width, size in zip(widths, sizes, strict=True):
        counts[int(width)] = counts.get(int(width), 0) + size
    return tuple((bits, counts[bits] / sum(sizes)) for bits in sorted(counts, reverse=True) if bits)


def expected_error(spectrum: Float[Tensor, " channels"], classes: Classes) -> float:
    """Error that a tensor of this spectrum, falling, keeps with these classes."""
    counts = [(bits, round(share * len(spectrum))) for bits, share in classes]
    left = len(spectrum) - sum(count for _, count in counts)
    errors = [torch.full((n,), GAUSSIAN[bits]) for bits, n in [*counts, (0, left)]]
    return float((spectrum.double().cpu() * torch.cat(errors).double()).sum())
