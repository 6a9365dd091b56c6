"""The registry: every scheme is one entry, a summary and a function from its knobs to a spec.

A new scheme is a new entry of `SCHEMES`; the tests are parametrized over it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from duotone.quant.our_schemes import (
    duotone,
    duotone_whole,
    klt,
    mixed,
    stream,
    tuned,
)
from duotone.quant.published_schemes import (
    asymkv,
    calibquant,
    calibquant_paper,
    dense,
    innerq,
    kivi,
    kivi_sink,
    lloyd,
    minmax,
    pyramidinfer,
    vl_cache,
    xquant,
)
from duotone.quant.rivals import kvarn, oscar_rotation, oscar_scaling, turboquant
from duotone.quant.spec import CacheSpec
from duotone.quant.spec_base import is_count, require, shown

# Characters of an unknown name that are compared with the names of schemes.
LONGEST_NAME = 100


@dataclass(frozen=True)
class Scheme:
    """Entry of the registry: a summary with its source, and how knobs become a `CacheSpec`.

    model: the model that the scheme is made for; None: any.
    """

    summary: str
    build: Callable[..., CacheSpec]
    model: str | None = None


SCHEMES: dict[str, Scheme] = {
    "duotone": Scheme(
        "Our data-free default, with constants of six models: up to 4 bits each picture's tokens "
        "in two parts, those that stand out from its mean key with most of the bits; channels of "
        "unequal width up to 3 bits, gains about the mean, parameters in 8 bits",
        duotone,
    ),
    "duotone-whole": Scheme(
        "For pictures that cannot be divided: a range per image and Lloyd levels with a gain; up "
        "to 2 bits channels of unequal width, at 1 bit 4, 2 or 0 in K (groups of 64 tokens) and "
        "2, 1 or 0 in V",
        duotone_whole,
    ),
    "duotone-klt": Scheme(
        "Transform coding for the embedded duotone-tiny alone: calibrated bases, bits by one "
        "budget over all layers, two parts per picture; duotone calibrate makes one for a model "
        "of yours",
        klt,
        model="duotone-tiny",
    ),
    "calibquant": Scheme(
        "CalibQuant as released: channel-wise min/max shrunk by .5 (K) and .3 (V) at 1 bit, "
        "tau (0, 3) up to 2 bits (arXiv 2502.14882, code)",
        calibquant,
    ),
    "calibquant-paper": Scheme(
        "CalibQuant as written: channel-wise min/max, tau (0, 3) up to 2 bits (arXiv 2502.14882)",
        calibquant_paper,
    ),
    "minmax": Scheme("Channel-wise min/max, no calibration (CalibQuant Table 4)", minmax),
    "lloyd": Scheme("Channel-wise MSE-optimal levels, no gain, no calibration", lloyd),
    "kivi": Scheme(
        "All tokens: K along tokens, V along channels, groups of 32, at least 128 recent tokens "
        "in 16 bit (KIVI, arXiv 2402.02750; our window never drains, that of released=True does)",
        kivi,
    ),
    "kivi-sink": Scheme(
        "KIVI with the first 32 and at least 96 recent tokens in 16 bit (InnerQ's baseline)",
        kivi_sink,
    ),
    "asymkv": Scheme(
        "KIVI with 2 bits in the first lk layers of K and lv of V (None: all), 1 bit after; by "
        "default K 2, V 1 (AsymKV)",
        asymkv,
    ),
    "xquant": Scheme(
        "KIVI with 2 bits in the first kq (K) and vq (V) layers, 1 after, end points moved in by "
        "eta, and pairs of layers that share codes from km (K) and vm (V) on (XQuant)",
        xquant,
    ),
    "innerq": Scheme(
        "All tokens: K along channels, V along tokens, groups of 32, sign-and-magnitude or "
        "asymmetric by group, normalised keys, 32 sinks, at least 96 recent tokens (InnerQ)",
        innerq,
    ),
    "oscar-rotation": Scheme(
        "All tokens: a range per token of rotated channels, the largest 4 % (K) and 8 % (V) "
        "clipped, 64 sinks, 256 recent tokens (OSCAR, arXiv 2605.17757); a Hadamard matrix, or "
        "rotations of a calibrated file",
        oscar_rotation,
    ),
    "oscar-scaling": Scheme(
        "All tokens: KIVI's groups of 32 after a Hadamard matrix, tokens of K divided by their "
        "norm, 128 recent tokens (OScaR, arXiv 2605.19660)",
        oscar_scaling,
    ),
    "kvarn": Scheme(
        "All tokens: Hadamard-rotated tiles of 128 tokens, deviations of tokens and channels made "
        "equal, K along tokens in 4 bits, V along channels in 2, 128 sinks (KVarN, arXiv "
        "2606.03458)",
        kvarn,
    ),
    "turboquant": Scheme(
        "All tokens: rotated keys in the Lloyd-Max levels of a Gaussian, scaled to their norm, a "
        "range per token for V, 3 or 4 bits (TurboQuant, arXiv 2504.19874, as vLLM has it)",
        turboquant,
    ),
    "duotone-stream": Scheme(
        "KIVI's groups with end points moved in for all tokens, a window of 96 in 16 bit", stream
    ),
    "duotone-mixed": Scheme(
        "Whole conversations: duotone's codes for visual spans, by default of 2 bits, and "
        "duotone-stream's for text and generated tokens, by default of 4 and with a window of 32",
        mixed,
    ),
    "vl-cache": Scheme(
        "Drops the tokens that the question attends to least, in 16 bit at the memory of `bits` "
        "bits; layers share the budget by their sparsity (VL-Cache, arXiv 2410.23317)",
        vl_cache,
    ),
    "pyramidinfer-cache": Scheme(
        "Drops the tokens that the last fifth of the prompt attends to least, more of them in "
        "deeper layers, in 16 bit at the memory of `bits` bits (PyramidInfer's choice for the "
        "cache alone: its prefill drops hidden states as well; arXiv 2405.12532)",
        pyramidinfer,
    ),
    "duotone-tuned": Scheme(
        "The spec that duotone tune found on duotone-tiny's calibration samples at 1.3 true bits; "
        "fits any depth",
        tuned,
    ),
    "dense": Scheme("16 bit through duotone's own containers: the exact reference", dense),
}


def schemes() -> dict[str, str]:
    """{name: one-line description with its source} of every registered scheme."""
    return {name: entry.summary for name, entry in SCHEMES.items()}


def scheme(name: str, **knobs: object) -> CacheSpec:
    """Return the named scheme's `CacheSpec`.

    knobs: what the scheme's entry accepts, mostly `bits`. Anything else: `spec.replace(...)`.
    Errors: ValueError for an unknown name (with the nearest ones) or an unknown knob.
    """
    require(isinstance(name, str), "a scheme's name is a text", name, "See duotone.schemes().")
    if name not in SCHEMES:
        start = name[:LONGEST_NAME]
        near = difflib.get_close_matches(start, SCHEMES, n=3, cutoff=0.4) or list(SCHEMES)
        rule = "a scheme must be among duotone.schemes()"
        raise ValueError(f"{rule}; got {shown(name)}. Did you mean {', '.join(near)}?")
    accepted = list(inspect.signature(SCHEMES[name].build).parameters)
    unknown = sorted(set(knobs) - set(accepted))
    if unknown:
        raise ValueError(
            f"scheme {name!r} takes {accepted or 'no arguments'}; got {shown(unknown)}. "
            "Change other fields with spec.replace(...)."
        )
    bits = knobs.get("bits", 1)
    require(is_count(bits), "bits must be an integer", bits, "E.g. bits=2.")
    return SCHEMES[name].build(**knobs)


def named(text: str) -> CacheSpec:
    """Return the `CacheSpec` of NAME or NAME@BITS, e.g. calibquant@1.

    Errors: ValueError as for `scheme`, and for bits that are no number.
    """
    name, bits = name_and_bits(text)
    return scheme(name) if bits is None else scheme(name, bits=bits)


def name_and_bits(text: str) -> tuple[str, int | None]:
    """("calibquant", 1) of "calibquant@1"; no bits without an @."""
    name, at, bits = text.partition("@")
    if at and not bits.isdecimal():
        raise ValueError(f"a scheme is NAME or NAME@BITS, e.g. calibquant@1; got {text!r}")
    return name, int(bits) if at else None
