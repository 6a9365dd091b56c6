"""Builders of duotone's own schemes; `schemes` registers them."""

from __future__ import annotations

from dataclasses import dataclass

from duotone.quant.bases import PRESETS
from duotone.quant.spec import CacheSpec, KVSpec, LayerRule, TensorSpec
from duotone.quant.tensor_spec import FLOAT8_BITS


def visual(key: TensorSpec, value: TensorSpec, **cache: object) -> CacheSpec:
    """Spec that quantizes visual spans by these quantizers, with text in 16 bit."""
    return CacheSpec(visual=KVSpec(key, value), text="dense", **cache)  # type: ignore[arg-type]


# By bits: the classes of K's channels, of V's, and V's gain.
_DUOTONE_CHANNELS = {
    1: (((4, 1 / 8), (2, 1 / 4)), ((2, 1 / 8), (1, 3 / 4)), 1.25),
    2: (((4, 3 / 8), (2, 1 / 4)), ((4, 1 / 8), (2, 3 / 4)), 1.1),
}


def duotone(bits: int = 1) -> CacheSpec:
    """Spec chosen on calibration samples of duotone-tiny's three tasks.

    The spec needs no data; that its constants suit other models is not shown.

    At 1 and 2 bits, K and V have channels of unequal width, ordered by their weighted variance.
    Keys are in groups of 64 tokens. Levels are fitted to the tokens that stand out. V's levels
    have a further gain: it restores what tokens share and few levels lose. More bits need none of
    this.
    """
    if bits not in _DUOTONE_CHANNELS:
        tensor = TensorSpec(bits, levels="lloyd", gain="fit")
        return visual(tensor, tensor, ranges="run")
    key_classes, value_classes, gain = _DUOTONE_CHANNELS[bits]
    lloyd = TensorSpec(bits, levels="lloyd")
    key = lloyd.replace(group=64, gain="fit", classes=key_classes, energy=1.0)
    value = lloyd.replace(gain=gain, classes=value_classes, energy=1.5)
    return visual(key, value, ranges="run")


# Classes of channels (bits, share); an integer: all channels in so many bits.
Channels = tuple[tuple[int, float], ...] | int
_SIGNS = ((1, 1 / 2),)


@dataclass(frozen=True)
class Parts:
    """A span's tokens in two parts. share: in front; others: classes of K and of V.

    first: in back of the first layer. Its keys are those of single tokens, of which none stands
    out: channels without codes cost more there than in all other layers.
    """

    share: float
    front: tuple[Channels, Channels]
    back: tuple[Channels, Channels]
    first: tuple[Channels, Channels]


# By bits.
PARTS = {
    1: Parts(
        share=0.42,
        front=(((2, 3 / 4),), ((2, 1 / 2), (1, 1 / 2))),
        back=(_SIGNS, _SIGNS),
        first=(1, _SIGNS),
    ),
    2: Parts(
        share=0.32,
        front=(((4, 1 / 2), (2, 1 / 2)), ((4, 1 / 4), (2, 3 / 4))),
        back=(((2, 1 / 2), (1, 1 / 2)), ((2, 1 / 4), (1, 3 / 4))),
        first=(2, 2),
    ),
}


def duotone_parts(bits: int = 1) -> CacheSpec:
    """Spec with a foreground, chosen on five models of `training.zoo`.

    The tokens of a span that stand out have codes of their own. Both parts have channels of unequal
    width, ordered by their weighted variance. Levels are fitted to the tokens that stand out, and
    a gain restores what tokens share and few levels lose. More than 2 bits need none of this.
    """
    return _in_parts(bits, "float16")


def duotone_parts8(bits: int = 1) -> CacheSpec:
    """Spec of `duotone_parts` with scales and middles of levels in 8 bits.

    Codes of 8 bits need 16 bits: rounding would move levels by whole steps. So do biases of keys of
    several hundred (Qwen2.5); a cache gives 16 bits to layers that have them.
    """
    if bits not in PARTS and bits in FLOAT8_BITS:
        tensor = TensorSpec(bits, levels="lloyd", gain="fit", param_dtype="float8")
        return visual(tensor, tensor, ranges="run")
    return _in_parts(bits, "float8")


def _in_parts(bits: int, param_dtype: str) -> CacheSpec:
    if bits not in PARTS:
        return duotone(bits)
    parts = PARTS[bits]
    front, back, first = (
        KVSpec(_fitted(key, 1.0, param_dtype), _fitted(value, 1.5, param_dtype))
        for key, value in (parts.front, parts.back, parts.first)
    )
    rules = (LayerRule(0, 1, background=first),)
    return CacheSpec(
        visual=front, background=back, foreground=parts.share, ranges="run", layers=rules
    )


def _fitted(channels: Channels, energy: float, param_dtype: str) -> TensorSpec:
    fitted = TensorSpec(levels="lloyd", gain="fit", energy=energy).replace(param_dtype=param_dtype)
    if isinstance(channels, int):
        return fitted.replace(bits=channels)
    return fitted.replace(classes=channels)


# XQuant's eta by bits (eq. 12): end points of a group are outliers of it.
_ETA = {1: 1 / 6, 2: 0.045}


def stream(bits: int = 2) -> CacheSpec:
    """Spec of one stream: KIVI's groups of 32 with end points moved in, 4 sinks, 96 recent.

    This is the least window whose loss on text is not above that of KIVI, which keeps 128 recent
    tokens: four fifths of KIVI's bytes. (docs/table.md).
    """
    key = TensorSpec(bits, along="tokens", group=32, eta=_ETA.get(bits, 0.0))
    value = key.replace(along="channels")
    return CacheSpec(visual="text", text=KVSpec(key, value), sink=4, recent=96)


def mixed(bits: int = 2) -> CacheSpec:
    """Spec with 1 bit for visual spans and `bits` for the stream of text and generated tokens."""
    return stream(bits).replace(visual=duotone().visual, ranges="run")


def _shipped(name: str) -> CacheSpec:
    return CacheSpec.from_json((PRESETS / f"{name}.json").read_text(encoding="utf-8"))


def tuned() -> CacheSpec:
    """Spec that `duotone tune` chose for duotone-tiny's tasks (results/tune, docs/tune.md)."""
    return _shipped("duotone-tuned")


def klt() -> CacheSpec:
    """Spec that `duotone calibrate` made for duotone-tiny's three tasks (docs/calibrate.md)."""
    return _shipped("duotone-klt")
