"""Data-free specs among which `choose.py` picks the presets: two parts of a span, as data.

A candidate is a share of a span's tokens in front, and classes of K and V in front and in back. A
name says what differs from `BASE`, the preset of before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from duotone import CacheSpec, KVSpec, TensorSpec

# Classes of channels (bits, share of channels); an integer: all channels in so many bits.
Channels = tuple[tuple[int, float], ...] | int


@dataclass(frozen=True)
class Part:
    """Channels of K and of V of one part of a span."""

    key: Channels
    value: Channels


@dataclass(frozen=True)
class Parts:
    """A candidate. share: of the tokens in front. energies, gains: of K and of V."""

    front: Part
    back: Part
    share: float = 3 / 8
    energies: tuple[float, float] = (1.0, 1.5)
    gains: tuple[float | str, float | str] = ("fit", 1.0)

    @property
    def spec(self) -> CacheSpec:
        """Spec with scales and middles of levels in 8 bits."""
        front, back = (
            KVSpec(*(self._tensor(x, i) for i, x in enumerate((part.key, part.value))))
            for part in (self.front, self.back)
        )
        return CacheSpec(visual=front, background=back, foreground=self.share, ranges="run")

    def _tensor(self, channels: Channels, which: int) -> TensorSpec:
        width = {"bits": channels} if isinstance(channels, int) else {"classes": channels}
        return TensorSpec(
            **width,
            levels="lloyd",
            energy=self.energies[which],
            gain=self.gains[which],
            param_dtype="float8",
        )


def same(channels: Channels) -> Part:
    """One rule for K and V."""
    return Part(channels, channels)


_FRONT_1 = Part(((4, 3 / 8), (2, 1 / 4)), ((4, 1 / 8), (2, 3 / 4)))
_FRONT_2 = Part(((4, 3 / 4), (2, 1 / 4)), ((4, 1 / 2), (2, 1 / 2)))
# By bits: the preset of before.
BASE = {
    1: Parts(_FRONT_1, same(((2, 1 / 8), (1, 1 / 4)))),
    2: Parts(_FRONT_2, Part(((4, 1 / 8), (2, 3 / 8)), ((2, 1 / 2),))),
}
_HALF = same(((1, 1 / 2),))
_ALL_1 = Part(((2, 1 / 4), (1, 3 / 4)), 1)
_ALL_2 = Part(((2, 1 / 2), (1, 1 / 2)), ((2, 1 / 4), (1, 3 / 4)))
_EVEN = Part(((4, 1 / 2), (2, 1 / 2)), ((4, 1 / 4), (2, 3 / 4)))

CANDIDATES: dict[int, dict[str, Parts]] = {
    1: {
        "base": BASE[1],
        "back signs": replace(BASE[1], back=_HALF),
        "back signs, .3": replace(BASE[1], back=_HALF, share=0.3),
        "back fewer signs, .36": replace(BASE[1], back=same(((1, 3 / 8),)), share=0.36),
        ".32": replace(BASE[1], share=0.32),
        "front 2 bits, back signs, .3": Parts(same(2), _HALF, 0.3),
        "front wider, back signs, 1/4": Parts(
            Part(((4, 1 / 2), (2, 1 / 4)), ((4, 1 / 4), (2, 3 / 4))), _HALF, 1 / 4
        ),
        "energies 0": replace(BASE[1], energies=(0.0, 0.0)),
        "energies 1/2": replace(BASE[1], energies=(0.5, 0.5)),
        "V gain fit": replace(BASE[1], gains=("fit", "fit")),
        "V gain 1.1": replace(BASE[1], gains=("fit", 1.1)),
        "K gain 1": replace(BASE[1], gains=(1.0, 1.0)),
    },
    2: {
        "base": BASE[2],
        "back without zeros": replace(BASE[2], back=_ALL_1),
        "back wider": replace(BASE[2], back=_ALL_2),
        "even, back wider": Parts(_EVEN, _ALL_2),
        "even, back without zeros, 1/2": Parts(_EVEN, _ALL_1, 1 / 2),
        "front 4 bits, back wider, 1/4": Parts(same(4), _ALL_2, 1 / 4),
        "front 3 bits, back wider": Parts(Part(((4, 1 / 2), (2, 1 / 2)), 2), _ALL_2),
        "back without zeros, energies 0": replace(BASE[2], back=_ALL_1, energies=(0.0, 0.0)),
        "back without zeros, energies 1/2": replace(BASE[2], back=_ALL_1, energies=(0.5, 0.5)),
        "back without zeros, V gain fit": replace(BASE[2], back=_ALL_1, gains=("fit", "fit")),
        "back without zeros, K gain 1": replace(BASE[2], back=_ALL_1, gains=(1.0, 1.0)),
    },
    4: {"parts of 4 bits": Parts(same(4), same(4))},
}
