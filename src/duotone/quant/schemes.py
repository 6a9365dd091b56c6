"""The registry: every scheme is one entry, a summary and a function from its knobs to a spec.

A new scheme is a new entry of `SCHEMES`; the tests are parametrized over it.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

from duotone.quant.eviction import Eviction
from duotone.quant.our_schemes import (
    duotone,
    duotone_parts,
    duotone_parts8,
    klt,
    mixed,
    stream,
    tuned,
    visual,
)
from duotone.quant.rivals import kvarn, oscar_rotation, oscar_scaling, turboquant
from duotone.quant.spec import CacheSpec, KVSpec, LayerRule, Sharing, TensorSpec
from duotone.quant.spec_base import is_count, is_number, require, shown

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


def _calibquant(bits: int = 1, ties: str = "up", channels: bool = True) -> CacheSpec:
    """ties: "even" is the code's rounding. channels: False: one range for V of all kv heads."""
    shrinks = (0.5, 0.3) if bits == 1 else (1.0, 1.0)
    key, value = (TensorSpec(bits, shrink=shrink, ties=ties) for shrink in shrinks)  # type: ignore[arg-type]
    if not channels:
        value = value.replace(along="span", heads="all")
    return visual(key, value, tau=(0, 3) if bits <= 2 else None)


def _calibquant_paper(bits: int = 1) -> CacheSpec:
    return visual(TensorSpec(bits), TensorSpec(bits), tau=(0, 3) if bits <= 2 else None)


def _minmax(bits: int = 1) -> CacheSpec:
    return visual(TensorSpec(bits), TensorSpec(bits))


def _lloyd(bits: int = 1) -> CacheSpec:
    tensor = TensorSpec(bits, levels="lloyd")
    return visual(tensor, tensor)


# Of KIVI's code: K's window drains when it holds so many tokens; V's keeps so many and the newest.
RELEASED_WINDOW = 128


def _window(released: bool) -> dict[str, int]:
    """128 recent tokens, or the window of released code."""
    return {"recent": 0, "flush": RELEASED_WINDOW} if released else {"recent": 128}


def _kivi_pair(key_bits: int, value_bits: int, released: bool = False, **fields: object) -> KVSpec:
    """KIVI's axes: a scale per channel of 32 tokens for K, per token of 32 channels for V.

    released: half to even, and V that lags.
    """
    if released:
        fields |= {"ties": "even"}
    key = TensorSpec(key_bits, along="tokens", group=32, **fields)  # type: ignore[arg-type]
    value = TensorSpec(value_bits, along="channels", group=32, **fields)  # type: ignore[arg-type]
    return KVSpec(key, value.replace(lag=RELEASED_WINDOW + 1) if released else value)


def _stream(text: KVSpec, **cache: object) -> CacheSpec:
    return CacheSpec(visual="text", text=text, **cache)  # type: ignore[arg-type]


def _kivi(bits: int = 2, released: bool = False) -> CacheSpec:
    """released: the code's rounding and windows: K's drains, the last 128 of V stay exact."""
    return _stream(_kivi_pair(bits, bits, released), **_window(released))


def _kivi_sink(bits: int = 2) -> CacheSpec:
    return _stream(_kivi_pair(bits, bits), sink=32, recent=96)


def _by_depth(pairs: dict[int, KVSpec]) -> tuple[KVSpec, tuple[LayerRule, ...]]:
    """Policy of the first layers, and rules for the layers from each further key on."""
    starts = sorted(pairs)
    rules = [LayerRule(start, text=pairs[start]) for start in starts if start]
    return pairs[starts[0]], tuple(rules)


def _two_then_one(
    key_layers: int | None,
    value_layers: int | None,
    eta: tuple[float, float] = (0.0, 0.0),
    released: bool = False,
) -> tuple[KVSpec, tuple[LayerRule, ...]]:
    """2 bits in the first layers of K and of V (None: in all), 1 bit after; eta at (1, 2) bits."""
    for n in (key_layers, value_layers):
        require(
            n is None or is_count(n), "a number of layers must be >= 0 or None", n, "None: all."
        )
    for value in eta:
        TensorSpec(eta=value)  # Raises also for a width that no layer has.
    ends = [math.inf if n is None else n for n in (key_layers, value_layers)]
    pairs = {}
    for start in sorted({0, *(int(end) for end in ends if end != math.inf)}):
        bits = [2 if start < end else 1 for end in ends]
        tensors = _kivi_pair(*bits, released)
        key, value = (
            tensor.replace(eta=eta[tensor.bits - 1]) for tensor in (tensors.key, tensors.value)
        )
        pairs[start] = KVSpec(key, value)
    return _by_depth(pairs)


def _asymkv(lk: int | None = None, lv: int | None = 0, released: bool = False) -> CacheSpec:
    text, layers = _two_then_one(lk, lv, released=released)
    return _stream(text, layers=layers, **_window(released))


def _pair_weights(gamma: float, layers: int) -> tuple[float, float]:
    ok = is_number(gamma) and 0 <= gamma <= 1
    require(ok, "gamma must lie in [0, 1]", gamma, "It is the weight of a pair's first layer.")
    remedy = "For longer runs: spec.replace(share=Sharing(layers=..., weights=...))."
    require(layers == 2, "gamma needs pairs, layers=2", layers, remedy)
    return gamma, 1 - gamma


def _xquant(
    kq: int = 0,
    vq: int = 0,
    km: int = 0,
    vm: int = 0,
    eta1: float = 1 / 6,
    eta2: float = 0.045,
    layers: int = 2,
    dominant: int = 0,
    gamma: float | None = None,
    released: bool = False,
) -> CacheSpec:
    """kq, vq: layers of 2 bits. km, vm: first layer that shares. eta1, eta2: at 1 and 2 bits.

    gamma: weight of the first layer of a pair in the average of both layers' codes (the paper's
    gamma_0, Table 5); None: the dominant layer's codes alone. released: as of `kivi`.
    """
    text, rules = _two_then_one(kq, vq, (eta1, eta2), released)
    weights = None if gamma is None else _pair_weights(gamma, layers)
    share = Sharing(key=km, value=vm, layers=layers, dominant=dominant, weights=weights)
    return _stream(text, layers=rules, share=share, **_window(released))


def _innerq(bits: int = 2, mapping: str = "hybrid") -> CacheSpec:
    """Groups along the inner dimension of both products: K within a token, V along tokens.

    mapping: of a `TensorSpec`, or "hybrid-prefill": hybrid at prefill, symmetric afterwards.
    """
    fields = {"mapping": mapping}
    if mapping == "hybrid-prefill":
        fields = {"mapping": "hybrid", "hybrid_at": "prefill"}
    key = TensorSpec(bits, along="channels", group=32, **fields)  # type: ignore[arg-type]
    value = TensorSpec(bits, along="tokens", group=32, **fields)  # type: ignore[arg-type]
    published = {"key_norm": True, "scale_keys": "never"}
    return _stream(KVSpec(key, value), sink=32, recent=96, **published)


def _vl_cache(bits: int = 1, keep: float | None = None) -> CacheSpec:
    """keep: share of the prompt's tokens; by default the memory of `bits` bits, bits / 16."""
    share = bits / 16 if keep is None else keep
    evict = Eviction(share, budget="sparsity", judges="post-visual", recent=0.1)
    return _dense().replace(evict=evict)


def _pyramidinfer(bits: int = 1, keep: float | None = None) -> CacheSpec:
    """keep: share of the prompt's tokens; by default the memory of `bits` bits, bits / 16."""
    evict = Eviction(
        bits / 16 if keep is None else keep,
        budget="pyramid",
        judges="recent",
        window=0.2,
        newest_weight=1.2,
        sink=4,
        recent=0.2,
        nested=True,
    )
    return _dense().replace(evict=evict)


def _dense() -> CacheSpec:
    return CacheSpec(visual="dense", text="dense")


SCHEMES: dict[str, Scheme] = {
    "duotone": Scheme(
        "Our data-free default: a range per image and Lloyd levels with a gain; up to 2 bits "
        "channels of unequal width by their variance, at 1 bit 4, 2 or 0 in K (groups of 64 "
        "tokens) and 2, 1 or 0 in V",
        duotone,
    ),
    "duotone-parts": Scheme(
        "duotone with each picture's tokens in two parts: those that stand out from its mean key, "
        "with most of the bits, and the others; data-free as well",
        duotone_parts,
    ),
    "duotone-parts8": Scheme(
        "duotone-parts with scales and means in 8 bits, an exponent per block: half of the bits "
        "that short pictures spend on them",
        duotone_parts8,
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
        _calibquant,
    ),
    "calibquant-paper": Scheme(
        "CalibQuant as written: channel-wise min/max, tau (0, 3) up to 2 bits (arXiv 2502.14882)",
        _calibquant_paper,
    ),
    "minmax": Scheme("Channel-wise min/max, no calibration (CalibQuant Table 4)", _minmax),
    "lloyd": Scheme("Channel-wise MSE-optimal levels, no gain, no calibration", _lloyd),
    "kivi": Scheme(
        "All tokens: K along tokens, V along channels, groups of 32, at least 128 recent tokens "
        "in 16 bit (KIVI, arXiv 2402.02750; our window never drains, that of released=True does)",
        _kivi,
    ),
    "kivi-sink": Scheme(
        "KIVI with the first 32 and at least 96 recent tokens in 16 bit (InnerQ's baseline)",
        _kivi_sink,
    ),
    "asymkv": Scheme(
        "KIVI with 2 bits in the first lk layers of K and lv of V (None: all), 1 bit after; by "
        "default K 2, V 1 (AsymKV)",
        _asymkv,
    ),
    "xquant": Scheme(
        "KIVI with 2 bits in the first kq (K) and vq (V) layers, 1 after, end points moved in by "
        "eta, and pairs of layers that share codes from km (K) and vm (V) on (XQuant)",
        _xquant,
    ),
    "innerq": Scheme(
        "All tokens: K along channels, V along tokens, groups of 32, sign-and-magnitude or "
        "asymmetric by group, normalised keys, 32 sinks, at least 96 recent tokens (InnerQ)",
        _innerq,
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
        "duotone's 1 bit for visual spans, duotone-stream's 2 bits for text and generated tokens",
        mixed,
    ),
    "vl-cache": Scheme(
        "Drops the tokens that the question attends to least, in 16 bit at the memory of `bits` "
        "bits; layers share the budget by their sparsity (VL-Cache, arXiv 2410.23317)",
        _vl_cache,
    ),
    "pyramidinfer-cache": Scheme(
        "Drops the tokens that the last fifth of the prompt attends to least, more of them in "
        "deeper layers, in 16 bit at the memory of `bits` bits (PyramidInfer's choice for the "
        "cache alone: its prefill drops hidden states as well; arXiv 2405.12532)",
        _pyramidinfer,
    ),
    "duotone-tuned": Scheme(
        "The spec that duotone tune found on duotone-tiny's calibration samples at 1.3 true bits; "
        "fits any depth",
        tuned,
    ),
    "dense": Scheme("16 bit through duotone's own containers: the exact reference", _dense),
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
