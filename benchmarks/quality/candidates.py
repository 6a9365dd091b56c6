"""Data-free specs among which `choose.py` picks the presets: two parts of a span, as data.

A candidate is a share of a span's tokens in front, and classes of K and V in front and in back. Its
name says how it differs from others. *One part*: spans of 60 to 111 tokens are not divided. At 1
and 2 bits, candidates that once lost 1.3 times as much as the preset in the mean are gone.
"""

from __future__ import annotations

from dataclasses import replace

from duotone.quant.our_schemes import Part, Parts, same

_SIGNS = ((1, 1 / 2),)
_UNIFORM = {"energies": (0.0, 0.0), "gains": (1.0, 1.0), "levels": "uniform"}
# In candidates of one part, the tokens from which on spans are divided.
DIVIDED = 112


def _in_one_part(parts: Parts) -> Parts:
    """Candidate without a background in spans of 60 to 111 tokens; parameters are dear there."""
    assert parts.short is not None
    return replace(parts, short=(parts.short, (DIVIDED, 1.0)))


def _both(candidates: dict[str, Parts]) -> dict[str, Parts]:
    """Candidates, then these in one part."""
    others = {f"{name}, one part": _in_one_part(each) for name, each in candidates.items()}
    return candidates | others


# 1 bit. More of K's channels have codes in front than of V's. All of K's have some in the
# background of the first packed layer, with a gain above its least squares.
_FRONT_K, _FRONT_V = ((4, 1 / 8), (2, 1 / 2), (1, 1 / 4)), ((2, 1 / 2), (1, 1 / 4))
_SHARP_K = ((4, 1 / 8), (2, 3 / 8), (1, 1 / 4))
_FINER_1 = Parts(
    Part(_FRONT_K, _FRONT_V),
    Part(((4, 1 / 8), (2, 3 / 8)), _SIGNS),
    0.37,
    short=(60, 0.12),
    gains=("fit", 1.2),
    first=Part(((2, 1 / 2), (1, 1 / 2)), _SIGNS),
    first_gains=(1.2, 1.2),
)
_LESS_OF_K = Part(((4, 1 / 8), (2, 1 / 2), (1, 1 / 8)), _FRONT_V)
_LESS_OF_V = Part(_FRONT_K, ((2, 1 / 4), (1, 1 / 2)))
# All of K's channels have 2 bits in the background of the first packed layer.
_FINER_2 = replace(_FINER_1, short=(60, 0.08), first=Part(2, _SIGNS), first_gains=(1.1, 1.2))
_FINER_2_LESS_K = replace(_FINER_2, front=_LESS_OF_K, share=0.43, short=(60, 0.1))
_OF_1_BIT = {
    "finer, less K, .44 and .14": replace(_FINER_1, front=_LESS_OF_K, share=0.44, short=(60, 0.14)),
    "finer, less V, .48 and .14": replace(_FINER_1, front=_LESS_OF_V, share=0.48, short=(60, 0.14)),
    "finer, first K 2 bits, less K, .43 and .1": _FINER_2_LESS_K,
    "sharp, first 2 bits, .37 and .1": replace(
        _FINER_1, front=Part(_SHARP_K, ((2, 1 / 2), (1, 1 / 2))), short=(60, 0.1)
    ),
    **_both(
        {
            "finer, .37 and .12": _FINER_1,
            "finer, first K 2 bits, .37 and .08": _FINER_2,
            "finer, first K 2 bits, less K, gain 1.15": replace(
                _FINER_2_LESS_K, first_gains=(1.15, 1.2)
            ),
            "finer, first K 2 bits, less V, .49 and .1": replace(
                _FINER_2, front=_LESS_OF_V, share=0.49, short=(60, 0.1)
            ),
        },
    ),
}

# 2 bits. Half of K's channels have 4 bits in front, and some in back.
_BACK_K = ((4, 1 / 8), (2, 1 / 2), (1, 1 / 4))
_EVEN_SHARP = Parts(
    Part(((4, 1 / 2), (2, 1 / 2)), ((4, 1 / 4), (2, 3 / 4))),
    Part(_BACK_K, ((2, 1 / 4), (1, 3 / 4))),
    0.36,
    short=(60, 0.28),
    gains=("fit", 1.1),
    first=same(2),
)
_EVEN_SHARP_4 = replace(_EVEN_SHARP, short=(60, 0.22), first=Part(4, 2))
# More channels of V have 2 bits in back.
_MORE_V = replace(
    _EVEN_SHARP_4,
    back=Part(_BACK_K, ((2, 3 / 8), (1, 5 / 8))),
    share=0.33,
    short=(60, 0.18),
)
_OF_2_BITS = {
    "even, sharp, more V, .33 and .18, first 4 bits, V gain 1.1": _MORE_V,
    **_both(
        {
            "even, sharp, .36 and .28, first 2 bits, V gain 1.1": _EVEN_SHARP,
            "even, sharp, .36 and .22, first 4 bits, V gain 1.1": _EVEN_SHARP_4,
            "even, sharp, more V, .33 and .18, first 4 bits, V gain 1.05": replace(
                _MORE_V, gains=("fit", 1.05)
            ),
        },
    ),
}

_HALF = ((4, 1 / 2), (2, 1 / 2))
CANDIDATES: dict[int, dict[str, Parts]] = {
    1: _OF_1_BIT,
    2: _OF_2_BITS,
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
