"""Data-free specs among which `choose.py` picks the presets: two parts of a span, as data.

A candidate is a share of a span's tokens in front, and classes of K and V in front and in back. A
name says what differs from `BASE`, the preset of before.
"""

from __future__ import annotations

from dataclasses import replace

from duotone.quant.our_schemes import Part, Parts, same

_FRONT_1 = Part(((4, 3 / 8), (2, 1 / 4)), ((4, 1 / 8), (2, 3 / 4)))
_FRONT_2 = Part(((4, 3 / 4), (2, 1 / 4)), ((4, 1 / 2), (2, 1 / 2)))
_SIGNS, _FEWER, _MORE = (same(((1, share),)) for share in (1 / 2, 3 / 8, 3 / 4))
_ALL_1 = Part(((2, 1 / 4), (1, 3 / 4)), 1)
_ALL_2 = Part(((2, 1 / 2), (1, 1 / 2)), ((2, 1 / 4), (1, 3 / 4)))
_EVEN = Part(((4, 1 / 2), (2, 1 / 2)), ((4, 1 / 4), (2, 3 / 4)))
# By bits: the preset of before.
BASE = {
    1: Parts(_FRONT_1, same(((2, 1 / 8), (1, 1 / 4))), gains=("fit", 1.0)),
    2: Parts(_FRONT_2, Part(((4, 1 / 8), (2, 3 / 8)), ((2, 1 / 2),)), gains=("fit", 1.0)),
}
_OF_3 = Parts(_FRONT_1, _SIGNS, 0.3)
_MILD = Part(((4, 1 / 8), (2, 1 / 2)), ((2, 1 / 2), (1, 1 / 2)))
_MILDER = Parts(_MILD, _SIGNS, 0.45)
_OF_2_BITS = Parts(Part(((2, 3 / 4),), _MILD.value), _SIGNS, 0.45)
# Some channels of many bits in back, too: keys of some models have a few that count in all tokens.
_SHARP = Part(((4, 1 / 8), (2, 1 / 8), (1, 1 / 4)), _SIGNS.value)
_SHARPER = Parts(
    Part(((4, 1 / 8), (2, 3 / 8), (1, 1 / 4)), _MILD.value),
    _SHARP,
    0.5,
    (128, 0.26),
    first=Part(1, _SIGNS.value),
)
_WIDER, _EVENLY = Parts(_FRONT_2, _ALL_2), Parts(_EVEN, _ALL_2)

CANDIDATES: dict[int, dict[str, Parts]] = {
    1: {
        "base": BASE[1],
        "base, .32": replace(BASE[1], share=0.32),
        "base, .32, V gain fit": replace(BASE[1], share=0.32, gains=("fit", "fit")),
        "back signs, .3": _OF_3,
        "back signs, .3, V gain 1": replace(_OF_3, gains=("fit", 1.0)),
        "back signs, .3, V gain 1.2": replace(_OF_3, gains=("fit", 1.2)),
        "back signs, .3, energies 1/2": replace(_OF_3, energies=(0.5, 0.5)),
        "back signs, .28, first signs": replace(_OF_3, share=0.28, first=Part(1, _SIGNS.value)),
        "back signs, .26, first 2 bits": replace(_OF_3, share=0.26, first=Part(2, _SIGNS.value)),
        "back fewer signs, .36": Parts(_FRONT_1, _FEWER, 0.36),
        "back K fewer, V more signs, .3": Parts(_FRONT_1, Part(((1, 3 / 8),), ((1, 5 / 8),)), 0.3),
        "front 2 bits, back signs, .3": Parts(same(2), _SIGNS, 0.3),
        "front 2 bits, back signs, .28, first signs": Parts(
            same(2), _SIGNS, 0.28, first=Part(1, _SIGNS.value)
        ),
        "back K more signs, .22": Parts(_FRONT_1, Part(_MORE.key, _SIGNS.value), 0.22),
        "front 2 bits, back K 1 bit, .22": Parts(same(2), Part(1, ((1, 1 / 4),)), 0.22),
        "whole": Parts(Part(((4, 1 / 8), (2, 1 / 4)), ((2, 1 / 4), (1, 5 / 8)))),
        "whole wider": Parts(Part(((4, 1 / 8), (2, 3 / 8)), ((2, 1 / 4), (1, 3 / 4)))),
        "milder, .45": _MILDER,
        "milder, .45, V gain 1.1": replace(_MILDER, gains=("fit", 1.1)),
        "milder, .42, first signs": replace(_MILDER, share=0.42, first=Part(1, _SIGNS.value)),
        "K of 2 bits, .45": _OF_2_BITS,
        "K of 2 bits, .42, first signs": replace(
            _OF_2_BITS, share=0.42, first=Part(1, _SIGNS.value)
        ),
        "K of 2 bits, .45, V gain 1.1": replace(_OF_2_BITS, gains=("fit", 1.1)),
        "milder K, .36": replace(_MILDER, front=Part(_MILD.key, _FRONT_1.value), share=0.36),
        "milder V, .36": replace(_MILDER, front=Part(_FRONT_1.key, _MILD.value), share=0.36),
        "milder, .26": Parts(
            same(_FRONT_1.value), Part(((2, 1 / 8), (1, 1 / 4)), _SIGNS.key), 0.26
        ),
        "K of 2 bits, .58 and .42, first signs": replace(
            _OF_2_BITS, share=0.58, short=(128, 0.42), first=Part(1, _SIGNS.value)
        ),
        "sharp, .5 and .26": _SHARPER,
        "sharp, .26": replace(_SHARPER, share=0.26, short=None),
        "sharp, energies 1/2": replace(_SHARPER, energies=(0.5, 1.0)),
        "sharp, milder front, .5 and .26": replace(_SHARPER, front=_MILD, short=(128, 0.26)),
        "sharp, front K of 2 bits, .5 and .26": replace(
            _SHARPER, front=Part(((2, 3 / 4),), _MILD.value), short=(128, 0.26)
        ),
        "sharp, V of more bits in front": replace(
            _SHARPER,
            front=Part(_SHARPER.front.key, ((2, 3 / 4), (1, 1 / 4))),
            share=0.44,
            short=(128, 0.22),
        ),
        "back K of 2 bits, .5 and .24": replace(
            _SHARPER, back=Part(((2, 1 / 4), (1, 1 / 2)), _SIGNS.value), short=(128, 0.24)
        ),
        "whole without zeros": Parts(same(((2, 1 / 8), (1, 7 / 8)))),
    },
    2: {
        "base": BASE[2],
        "back wider": _WIDER,
        "back wider, first 2 bits": replace(_WIDER, first=same(2)),
        "even, back wider": _EVENLY,
        "even, back wider, V gain 1": replace(_EVENLY, gains=("fit", 1.0)),
        "even, back wider, .32, first 2 bits": replace(_EVENLY, share=0.32, first=same(2)),
        "even, back wider, .45 and .32, first 2 bits": replace(
            _EVENLY, share=0.45, short=(128, 0.32), first=same(2)
        ),
        "even, sharp, .4 and .28, first 2 bits": replace(
            _EVENLY,
            back=Part(((4, 1 / 8), (2, 1 / 2), (1, 1 / 4)), _ALL_2.value),
            share=0.4,
            short=(128, 0.28),
            first=same(2),
        ),
        "even, sharp V, .4 and .26, first 2 bits": replace(
            _EVENLY,
            back=Part(_ALL_2.key, ((2, 1 / 2), (1, 1 / 2))),
            share=0.4,
            short=(128, 0.26),
            first=same(2),
        ),
        "even, back wider, energies 1.5, 2": replace(_EVENLY, energies=(1.5, 2.0)),
        "even, back K 2 bits, V 1, 1/3": Parts(_EVEN, Part(2, 1), 1 / 3),
        "even, back without zeros, 1/2": Parts(_EVEN, _ALL_1, 1 / 2),
        "back without zeros, first 2 bits": Parts(_FRONT_2, _ALL_1, first=Part(2, 1)),
        "whole": Parts(Part(((4, 3 / 8), (2, 1 / 4), (1, 3 / 8)), ((4, 1 / 8), (2, 3 / 4)))),
        "whole, one width": Parts(same(2)),
    },
    4: {
        "parts of 4 bits": Parts(same(4), same(4)),
        "parts of 4 bits, energies 0": Parts(same(4), same(4), energies=(0.0, 0.0)),
        "parts of 4 bits, min/max": Parts(
            same(4), same(4), energies=(0.0, 0.0), gains=(1.0, 1.0), levels="uniform"
        ),
        "whole": Parts(same(4)),
        "whole, min/max": Parts(same(4), energies=(0.0, 0.0), gains=(1.0, 1.0), levels="uniform"),
    },
}
