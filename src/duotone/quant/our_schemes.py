"""Builders of duotone's own schemes; `schemes` registers them."""

from __future__ import annotations

from duotone.quant.bases import PRESETS
from duotone.quant.spec import CacheSpec, KVSpec, TensorSpec
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


# By bits: classes of K and of V of the foreground, then of the background.
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
    """Spec with a foreground, chosen on calibration samples of duotone-tiny's tasks.

    3/8 of a span's tokens, those that stand out, have codes of their own. Both parts have channels
    of unequal width, ordered by their weighted variance. More than 2 bits need none of this.
    """
    if bits not in _PARTS_CHANNELS:
        return duotone(bits)
    key = TensorSpec(levels="lloyd", gain="fit", energy=1.0)
    value = TensorSpec(levels="lloyd", energy=1.5)
    front, back = (
        KVSpec(key.replace(classes=k), value.replace(classes=v)) for k, v in _PARTS_CHANNELS[bits]
    )
    return CacheSpec(visual=front, background=back, foreground=3 / 8, ranges="run")


def duotone_parts8(bits: int = 1) -> CacheSpec:
    """Spec of `duotone_parts` with scales and zero-points in 8 bits.

    Codes of 8 bits keep theirs in 16 bit: rounding would move levels by whole steps.
    """
    spec = duotone_parts(bits)
    if bits not in FLOAT8_BITS:
        return spec
    policies = {name: getattr(spec, name) for name in ("visual", "background")}
    return spec.replace(
        **{name: _in_8_bits(kv) for name, kv in policies.items() if isinstance(kv, KVSpec)}
    )


def _in_8_bits(kv: KVSpec) -> KVSpec:
    return KVSpec(*(tensor.replace(param_dtype="float8") for tensor in (kv.key, kv.value)))


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
