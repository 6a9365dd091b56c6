"""Builders of duotone's own schemes; `schemes` registers them."""

from __future__ import annotations

from duotone.quant.bases import PRESETS
from duotone.quant.spec import CacheSpec, KVSpec, TensorSpec


def visual(key: TensorSpec, value: TensorSpec, **cache: object) -> CacheSpec:
    """Visual spans by these quantizers, text in 16 bit."""
    return CacheSpec(visual=KVSpec(key, value), text="dense", **cache)  # type: ignore[arg-type]


# By bits: the classes of K's channels, of V's, and V's gain.
_DUOTONE_CHANNELS = {
    1: (((4, 1 / 8), (2, 1 / 4)), ((2, 1 / 8), (1, 3 / 4)), 1.25),
    2: (((4, 3 / 8), (2, 1 / 4)), ((4, 1 / 8), (2, 3 / 4)), 1.1),
}


def duotone(bits: int = 1) -> CacheSpec:
    """Chosen on calibration samples of duotone-tiny's three tasks (dev/log/quality.md, 2026-11-21).

    Needs no data to use; that these constants suit other models is not shown.

    At 1 and 2 bits: unequal channels in K and V, ordered by their weighed variance; keys in
    groups of 64 tokens; levels fitted to the tokens that stand out, and V's a further gain apart,
    which undoes what few levels lose of what tokens share. More bits need none of it.
    """
    if bits not in _DUOTONE_CHANNELS:
        tensor = TensorSpec(bits, levels="lloyd", gain="fit")
        return visual(tensor, tensor, ranges="run")
    key_classes, value_classes, gain = _DUOTONE_CHANNELS[bits]
    lloyd = TensorSpec(bits, levels="lloyd")
    key = lloyd.replace(group=64, gain="fit", classes=key_classes, energy=1.0)
    value = lloyd.replace(gain=gain, classes=value_classes, energy=1.5)
    return visual(key, value, ranges="run")


# By bits: classes of K and of V in front, of K and of V behind.
_PARTS_CHANNELS = {
    1: (
        (((4, 3 / 8), (2, 1 / 4)), ((4, 1 / 8), (2, 3 / 4))),
        (((2, 1 / 8), (1, 1 / 4)), ((2, 1 / 8), (1, 1 / 4))),
    ),
    2: (
        (((4, 3 / 4), (2, 1 / 4)), ((4, 1 / 2), (2, 1 / 2))),
        (((4, 1 / 8), (2, 3 / 8)), ((2, 1 / 2),)),
    ),
}


def duotone_parts(bits: int = 1) -> CacheSpec:
    """Chosen on calibration samples of duotone-tiny's tasks (dev/log/quality.md, 2026-11-22).

    3/8 of a span's tokens, those that stand out, have codes of their own; both parts have unequal
    channels, ordered by their weighed variance. More than 2 bits need none of it.
    """
    if bits not in _PARTS_CHANNELS:
        return duotone(bits)
    key = TensorSpec(levels="lloyd", gain="fit", energy=1.0)
    value = TensorSpec(levels="lloyd", energy=1.5)
    front, back = (
        KVSpec(key.replace(classes=k), value.replace(classes=v)) for k, v in _PARTS_CHANNELS[bits]
    )
    return CacheSpec(visual=front, background=back, foreground=3 / 8, ranges="run")


# XQuant's eta by bits (eq. 12): end points of a group are outliers of it.
_ETA = {1: 1 / 6, 2: 0.045}


def stream(bits: int = 2) -> CacheSpec:
    """Everything in one stream: KIVI's groups of 32 with end points moved in, 4 sinks, 96 recent.

    The least window whose loss on text is not above KIVI's, which has 128 recent tokens: four
    fifths of its bytes. Half of it in 8-bit floats loses ten times as much (docs/table.md).
    """
    key = TensorSpec(bits, along="tokens", group=32, eta=_ETA.get(bits, 0.0))
    value = key.replace(along="channels")
    return CacheSpec(visual="text", text=KVSpec(key, value), sink=4, recent=96)


def mixed(bits: int = 2) -> CacheSpec:
    """The 1-bit preset for visual spans; `bits` for the stream of text and generated tokens."""
    return stream(bits).replace(visual=duotone().visual, ranges="run")


def _shipped(name: str) -> CacheSpec:
    return CacheSpec.from_json((PRESETS / f"{name}.json").read_text(encoding="utf-8"))


def tuned() -> CacheSpec:
    """What `duotone tune` chose for duotone-tiny's three tasks (results/tune, docs/tune.md)."""
    return _shipped("duotone-tuned")


def klt() -> CacheSpec:
    """What `duotone calibrate` made of duotone-tiny and its three tasks (docs/calibrate.md)."""
    return _shipped("duotone-klt")
