"""Builders of schemes of papers up to 2025, of their baselines and of plain codes.

`schemes` registers them; schemes of 2026 are in `rivals`.
"""

from __future__ import annotations

import math

from duotone.quant.eviction import Eviction
from duotone.quant.our_schemes import visual
from duotone.quant.spec import CacheSpec, KVSpec, LayerRule, Sharing, TensorSpec
from duotone.quant.spec_base import is_count, is_number, require


def calibquant(bits: int = 1, ties: str = "up", channels: bool = True) -> CacheSpec:
    """CalibQuant's released code (arXiv 2502.14882).

    ties: "even" is the code's rounding. channels: False: one range for V of all kv heads.
    """
    shrinks = (0.5, 0.3) if bits == 1 else (1.0, 1.0)
    key, value = (TensorSpec(bits, shrink=shrink, ties=ties) for shrink in shrinks)  # type: ignore[arg-type]
    if not channels:
        value = value.replace(along="span", heads="all")
    return visual(key, value, tau=(0, 3) if bits <= 2 else None)


def calibquant_paper(bits: int = 1) -> CacheSpec:
    """CalibQuant as written (arXiv 2502.14882)."""
    return visual(TensorSpec(bits), TensorSpec(bits), tau=(0, 3) if bits <= 2 else None)


def minmax(bits: int = 1) -> CacheSpec:
    """A range per channel, without calibration (CalibQuant Table 4)."""
    return visual(TensorSpec(bits), TensorSpec(bits))


def lloyd(bits: int = 1) -> CacheSpec:
    """Levels of least squared error per channel."""
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


def kivi(bits: int = 2, released: bool = False) -> CacheSpec:
    """KIVI (arXiv 2402.02750).

    released: the code's rounding and windows: K's drains, the last 128 of V stay exact.
    """
    return _stream(_kivi_pair(bits, bits, released), **_window(released))


def kivi_sink(bits: int = 2) -> CacheSpec:
    """KIVI with sinks (InnerQ's baseline)."""
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


def asymkv(lk: int | None = None, lv: int | None = 0, released: bool = False) -> CacheSpec:
    """AsymKV. lk, lv: first layers of 2 bits, None: all; 1 bit after. released: as of `kivi`."""
    text, layers = _two_then_one(lk, lv, released=released)
    return _stream(text, layers=layers, **_window(released))


def _pair_weights(gamma: float, layers: int) -> tuple[float, float]:
    ok = is_number(gamma) and 0 <= gamma <= 1
    require(ok, "gamma must lie in [0, 1]", gamma, "It is the weight of a pair's first layer.")
    remedy = "For longer runs: spec.replace(share=Sharing(layers=..., weights=...))."
    require(layers == 2, "gamma needs pairs, layers=2", layers, remedy)
    return gamma, 1 - gamma


def xquant(
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
    """XQuant (arXiv 2510.11236).

    kq, vq: layers of 2 bits. km, vm: first layer that shares. eta1, eta2: at 1 and 2 bits.

    gamma: weight of the first layer of a pair in the average of both layers' codes (the paper's
    gamma_0, Table 5). None: the dominant layer's codes alone. released: as of `kivi`.
    """
    text, rules = _two_then_one(kq, vq, (eta1, eta2), released)
    weights = None if gamma is None else _pair_weights(gamma, layers)
    share = Sharing(key=km, value=vm, layers=layers, dominant=dominant, weights=weights)
    return _stream(text, layers=rules, share=share, **_window(released))


def innerq(bits: int = 2, mapping: str = "hybrid") -> CacheSpec:
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


def vl_cache(bits: int = 1, keep: float | None = None) -> CacheSpec:
    """VL-Cache (arXiv 2410.23317).

    keep: share of the prompt's tokens; by default the memory of `bits` bits, bits / 16.
    """
    share = bits / 16 if keep is None else keep
    evict = Eviction(share, budget="sparsity", judges="post-visual", recent=0.1)
    return dense().replace(evict=evict)


def pyramidinfer(bits: int = 1, keep: float | None = None) -> CacheSpec:
    """PyramidInfer's choice of tokens for the cache (arXiv 2405.12532).

    keep: share of the prompt's tokens; by default the memory of `bits` bits, bits / 16.
    """
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
    return dense().replace(evict=evict)


def dense() -> CacheSpec:
    """All tokens in 16 bit, through our own containers."""
    return CacheSpec(visual="dense", text="dense")
