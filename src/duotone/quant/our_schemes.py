"""Builders of duotone's own schemes; `schemes` registers them."""

from __future__ import annotations

from dataclasses import dataclass

from duotone.quant.bases import PRESETS
from duotone.quant.spec import CacheSpec, KVSpec, LayerRule, TensorSpec
from duotone.quant.tensor_spec import FLOAT8_BITS


def visual(key: TensorSpec, value: TensorSpec, **cache: object) -> CacheSpec:
    """Spec that quantizes visual spans by these quantizers, with text in 16 bit."""
    return CacheSpec(visual=KVSpec(key, value), text="dense", **cache)  # type: ignore[arg-type]


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


def duotone(bits: int = 1) -> CacheSpec:
    """Spec chosen on five models of `training.zoo`; it needs no data.

    At 1 and 2 bits, the tokens of a span that stand out have codes of their own. Both parts have
    channels of unequal width, ordered by their weighted variance. Levels are fitted to the tokens
    that stand out, and a gain restores what tokens share and few levels lose. More bits need one
    part and one width. Scales and middles of levels have 8 bits. Codes of 8 bits need 16, since
    rounding would move levels by whole steps. So do biases of keys of several hundred (Qwen2.5); a
    cache gives 16 bits to layers that have them.
    """
    if bits not in PARTS:
        return _one_width(bits, "float8" if bits in FLOAT8_BITS else "float16")
    parts = PARTS[bits]
    return CacheSpec(
        visual=_fitted(*parts.front),
        background=_fitted(*parts.back),
        foreground=parts.share,
        ranges="run",
        layers=(LayerRule(0, 1, background=_fitted(*parts.first)),),
    )


def _fitted(key: Channels, value: Channels) -> KVSpec:
    return KVSpec(_fitted_tensor(key, 1.0), _fitted_tensor(value, 1.5))


def _fitted_tensor(channels: Channels, energy: float) -> TensorSpec:
    fitted = TensorSpec(levels="lloyd", gain="fit", energy=energy, param_dtype="float8")
    if isinstance(channels, int):
        return fitted.replace(bits=channels)
    return fitted.replace(classes=channels)


def _one_width(bits: int, param_dtype: str) -> CacheSpec:
    tensor = TensorSpec(bits, levels="lloyd", gain="fit", param_dtype=param_dtype)
    return visual(tensor, tensor, ranges="run")


# By bits: the classes of K's channels, of V's, and V's gain.
_WHOLE_CHANNELS = {
    1: (((4, 1 / 8), (2, 1 / 4)), ((2, 1 / 8), (1, 3 / 4)), 1.25),
    2: (((4, 3 / 8), (2, 1 / 4)), ((4, 1 / 8), (2, 3 / 4)), 1.1),
}


def duotone_whole(bits: int = 1) -> CacheSpec:
    """Spec for spans that cannot be divided, chosen on samples of duotone-tiny's three tasks.

    The spec needs no data; that its constants suit other models is not shown.

    At 1 and 2 bits, K and V have channels of unequal width, ordered by their weighted variance.
    Keys are in groups of 64 tokens. Levels are fitted to the tokens that stand out. V's levels
    have a further gain: it restores what tokens share and few levels lose. More bits need none of
    this. Parameters have 16 bits.
    """
    if bits not in _WHOLE_CHANNELS:
        return _one_width(bits, "float16")
    key_classes, value_classes, gain = _WHOLE_CHANNELS[bits]
    lloyd = TensorSpec(bits, levels="lloyd")
    key = lloyd.replace(group=64, gain="fit", classes=key_classes, energy=1.0)
    value = lloyd.replace(gain=gain, classes=value_classes, energy=1.5)
    return visual(key, value, ranges="run")


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
    """`duotone` at 1 bit for visual spans, `bits` for the stream of text and generated tokens."""
    one = duotone()
    parts = {name: getattr(one, name) for name in ("visual", "background", "foreground", "layers")}
    return stream(bits).replace(ranges="run", **parts)


def _shipped(name: str) -> CacheSpec:
    return CacheSpec.from_json((PRESETS / f"{name}.json").read_text(encoding="utf-8"))


def tuned() -> CacheSpec:
    """Spec that `duotone tune` chose for duotone-tiny's tasks (results/tune, docs/tune.md)."""
    return _shipped("duotone-tuned")


def klt() -> CacheSpec:
    """Spec that `duotone calibrate` made for duotone-tiny's three tasks (docs/calibrate.md)."""
    return _shipped("duotone-klt")
