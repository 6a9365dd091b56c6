"""Data-free specs among which `choose.py` picks the presets: two parts of a span, as data.

A candidate is a share of a span's tokens in front, and classes of K and V in front and in back. A
name says what differs from `BASE`, the preset of before.
"""

from __future__ import annotations

from dataclasses import replace

from duotone.quant.our_schemes import Part, Parts, same

_FRONT_1 = Part(((4, 3 / 8), (2, 1 / 4)), ((4, 1 / 8), (2, 3 / 4)))
_FRONT_2 = Part(((4, 3 / 4), (2, 1 / 4)), ((4, 1 / 2), (2, 1 / 2)))
_SIGNS = same(((1, 1 / 2),))
_ALL_1 = Part(((2, 1 / 4), (1, 3 / 4)), 1)
_ALL_2 = Part(((2, 1 / 2), (1, 1 / 2)), ((2, 1 / 4), (1, 3 / 4)))
_HALF = ((4, 1 / 2), (2, 1 / 2))
_EVEN = Part(((4, 1 / 2), (2, 1 / 2)), ((4, 1 / 4), (2, 3 / 4)))
# By bits: the preset of before.
BASE = {
    1: Parts(_FRONT_1, same(((2, 1 / 8), (1, 1 / 4))), gains=("fit", 1.0)),
    2: Parts(_FRONT_2, Part(((4, 1 / 8), (2, 3 / 8)), ((2, 1 / 2),)), gains=("fit", 1.0)),
}
# Back of the first layer, with codes for all channels of K.
_FIRST = Part(1, _SIGNS.value)
_SMALLER = Parts(_FRONT_1, _SIGNS, 0.3)
_MILD = Part(((4, 1 / 8), (2, 1 / 2)), ((2, 1 / 2), (1, 1 / 2)))
_MILDER = Parts(_MILD, _SIGNS, 0.42, first=_FIRST)
_OF_2_BITS = Parts(Part(((2, 3 / 4),), _MILD.value), _SIGNS, 0.42, first=_FIRST)
# Some channels of many bits in back, too: keys of some models have a few that count in all tokens.
_SHARP_BACK = Part(((4, 1 / 8), (2, 1 / 8), (1, 1 / 4)), _SIGNS.value)
_SHARP = Parts(Part(((4, 1 / 8), (2, 3 / 8), (1, 1 / 4)), _MILD.value), _SHARP_BACK, 0.26)
_SHARP = replace(_SHARP, first=_FIRST)
_SHARP_OF_2 = replace(_SHARP, front=_OF_2_BITS.front)
_WIDER, _EVENLY = Parts(_FRONT_2, _ALL_2), Parts(_EVEN, _ALL_2, 0.32, first=same(2))
_EVEN_SHARP = replace(
    _EVENLY,
    back=Part(((4, 1 / 8), (2, 1 / 2), (1, 1 / 4)), _ALL_2.value),
    share=0.28,
    gains=("fit", 1.1),
)
_EVEN_SHARP_4 = replace(_EVEN_SHARP, share=0.36, short=(60, 0.22), first=Part(4, 2))
# More channels of V have 2 bits in back.
_MORE_V = replace(
    _EVEN_SHARP_4,
    back=Part(_EVEN_SHARP.back.key, ((2, 3 / 8), (1, 5 / 8))),
    share=0.33,
    short=(60, 0.18),
)
_UNIFORM = {"energies": (0.0, 0.0), "gains": (1.0, 1.0), "levels": "uniform"}

# More of K's channels have codes in front, fewer of V's. All of K's have some in the background of
# the first packed layer, with a gain above its least squares.
_FINER_FRONT = ((4, 1 / 8), (2, 1 / 2), (1, 1 / 4))
_FINER_1 = Parts(
    Part(_FINER_FRONT, ((2, 1 / 2), (1, 1 / 4))),
    Part(((4, 1 / 8), (2, 3 / 8)), _SIGNS.value),
    0.37,
    short=(60, 0.12),
    gains=("fit", 1.2),
    first=Part(((2, 1 / 2), (1, 1 / 2)), _SIGNS.value),
    first_gains=(1.2, 1.2),
)
_LESS_OF_K = Part(((4, 1 / 8), (2, 1 / 2), (1, 1 / 8)), _FINER_1.front.value)
_LESS_OF_V = Part(_FINER_FRONT, ((2, 1 / 4), (1, 1 / 2)))
_AS_SHARP = Part(_SHARP.front.key, _FINER_1.front.value)
# All of K's channels have 2 bits in the background of the first packed layer.
_FINER_2 = replace(_FINER_1, short=(60, 0.08), first=Part(2, _SIGNS.value), first_gains=(1.1, 1.2))
_FINER_2_LESS_K = replace(_FINER_2, front=_LESS_OF_K, share=0.43, short=(60, 0.1))
_FINER = {
    "finer, .37 and .12": _FINER_1,
    "finer, less K, .44 and .14": replace(_FINER_1, front=_LESS_OF_K, share=0.44, short=(60, 0.14)),
    "finer, less V, .48 and .14": replace(_FINER_1, front=_LESS_OF_V, share=0.48, short=(60, 0.14)),
    "finer, K as sharp, .44 and .16": replace(
        _FINER_1, front=_AS_SHARP, share=0.44, short=(60, 0.16)
    ),
    "finer, first K 2 bits, .37 and .08": _FINER_2,
    "finer, first K 2 bits, less K, .43 and .1": _FINER_2_LESS_K,
    "finer, first K 2 bits, less K, gain 1.15": replace(_FINER_2_LESS_K, first_gains=(1.15, 1.2)),
    "finer, first K 2 bits, less V, .49 and .1": replace(
        _FINER_2, front=_LESS_OF_V, share=0.49, short=(60, 0.1)
    ),
    "sharp, first 2 bits, .37 and .1": replace(
        _FINER_1, front=Part(_SHARP.front.key, _MILD.value), share=0.37, short=(60, 0.1)
    ),
}


def _with_gains(name: str, parts: Parts, *gains: float) -> dict[str, Parts]:
    """{label: candidate}: V's gain fitted to least squares, and some others."""
    others = {f"{name}, V gain {gain}": replace(parts, gains=("fit", gain)) for gain in gains}
    return {name: parts} | others


CANDIDATES: dict[int, dict[str, Parts]] = {
    1: {
        "base": BASE[1],
        "base, .32": replace(BASE[1], share=0.32),
        "back fewer signs, .36": Parts(_FRONT_1, same(((1, 3 / 8),)), 0.36),
        "front 2 bits, back signs, .28, first signs": Parts(same(2), _SIGNS, 0.28, first=_FIRST),
        "front 2 bits, back K 1 bit, .22": Parts(same(2), Part(1, ((1, 1 / 4),)), 0.22),
        "whole": Parts(Part(((4, 1 / 8), (2, 1 / 4)), ((2, 1 / 4), (1, 5 / 8)))),
        "whole without zeros": Parts(same(((2, 1 / 8), (1, 7 / 8)))),
        **_with_gains("back signs, .3", _SMALLER, 1.0, 1.2),
        **_with_gains("milder", _MILDER, 1.2),
        **_with_gains("K of 2 bits", _OF_2_BITS, 1.0, 1.1, 1.2),
        **_with_gains("sharp", _SHARP, 1.2),
        **_with_gains("sharp, K of 2 bits", _SHARP_OF_2, 1.1, 1.2, 1.3),
        "sharp, .5 and .26, V gain 1.2": replace(
            _SHARP, share=0.5, short=(128, 0.26), gains=("fit", 1.2)
        ),
        "sharp, .4 and .26, V gain 1.2": replace(
            _SHARP, share=0.4, short=(60, 0.26), gains=("fit", 1.2)
        ),
        "sharp, 2 bits in back, .42 and .2, V gain 1.2": Parts(
            Part(_SHARP.front.key, ((2, 1 / 2), (1, 1 / 4))),
            Part(((4, 1 / 8), (2, 3 / 8)), _SIGNS.value),
            0.42,
            short=(60, 0.2),
            gains=("fit", 1.2),
            first=_FIRST,
        ),
        "sharp, 2 bits in back, .37 and .13, V gain 1.2": replace(
            _SHARP,
            back=Part(((4, 1 / 8), (2, 3 / 8)), _SIGNS.value),
            share=0.37,
            short=(60, 0.13),
            gains=("fit", 1.2),
        ),
        **_FINER,
        "sharp, K of 2 bits, energies 1/2, V gain 1.2": replace(
            _SHARP_OF_2, energies=(0.5, 1.0), gains=("fit", 1.2)
        ),
    },
    2: {
        "base": BASE[2],
        "back wider": _WIDER,
        "even, back wider, V gain 1": replace(_WIDER, front=_EVEN, gains=("fit", 1.0)),
        **_with_gains("even, first 2 bits", _EVENLY, 1.0, 1.1, 1.2),
        **_with_gains("wider, first 2 bits", replace(_EVENLY, front=_FRONT_2, share=0.25), 1.1),
        "even, sharp, first 2 bits, V gain 1.1": _EVEN_SHARP,
        "even, sharp, .36 and .28, first 2 bits, V gain 1.1": replace(
            _EVEN_SHARP, share=0.36, short=(60, 0.28)
        ),
        "even, sharp, .36 and .22, first 4 bits, V gain 1.1": _EVEN_SHARP_4,
        "even, sharp, more V, .33 and .18, first 4 bits, V gain 1.1": _MORE_V,
        "even, sharp, more V, .33 and .18, first 4 bits, V gain 1.05": replace(
            _MORE_V, gains=("fit", 1.05)
        ),
        "even, back without zeros, 1/2": Parts(_EVEN, _ALL_1, 1 / 2),
        "whole": Parts(Part(((4, 3 / 8), (2, 1 / 4), (1, 3 / 8)), ((4, 1 / 8), (2, 3 / 4)))),
        "whole, one width": Parts(same(2)),
    },
    3: {
        "front 4 bits, back more of K": Parts(
            same(4), Part(_HALF, ((4, 1 / 8), (2, 7 / 8))), 0.3, gains=("fit", 1.05)
        ),
        "front 4 bits": Parts(
            same(4),
            Part(((4, 3 / 8), (2, 5 / 8)), ((4, 1 / 4), (2, 3 / 4))),
            0.3,
            gains=("fit", 1.05),
        ),
        "front 4 bits, .4": Parts(
            same(4), Part(((4, 1 / 4), (2, 3 / 4)), ((4, 1 / 8), (2, 7 / 8))), 0.4
        ),
        "whole": Parts(same(_HALF), gains=("fit", 1.05)),
        "whole, one width": Parts(same(3)),
    },
    4: {
        "parts of 4 bits": Parts(same(4), same(4)),
        "parts of 4 bits, min/max": Parts(same(4), same(4), **_UNIFORM),
        "whole": Parts(same(4)),
        "whole, min/max": Parts(same(4), **_UNIFORM),
    },
}
