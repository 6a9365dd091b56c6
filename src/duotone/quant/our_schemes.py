"""Builders of duotone's own schemes; `schemes` registers them."""

from __future__ import annotations

from dataclasses import dataclass

from duotone.quant.bases import PRESETS
from duotone.quant.spec import CacheSpec, KVSpec, LayerRule, Steps, TensorSpec
from duotone.quant.spec_base import is_count, require
from duotone.quant.tensor_spec import BITS, FLOAT8_BITS


def visual(key: TensorSpec, value: TensorSpec, **cache: object) -> CacheSpec:
    """Spec that quantizes visual spans by these quantizers, with text in 16 bit."""
    return CacheSpec(visual=KVSpec(key, value), text="dense", **cache)  # type: ignore[arg-type]


def with_pictures(spec: CacheSpec, pictures: CacheSpec) -> CacheSpec:
    """Spec with the visual half of another one."""
    foreground = ("foreground", "short_foreground", "foreground_multiple")
    names = ("visual", "background", *foreground, "tau", "ranges", "layers")
    return spec.replace(**{name: getattr(pictures, name) for name in names})


# Tokens of a tile of the decode kernels.
TILE = 64
# Classes of channels (bits, share of channels); an integer: all channels in so many bits.
Channels = tuple[tuple[int, float], ...] | int


@dataclass(frozen=True)
class Part:
    """Channels of K and of V of one part of a span."""

    key: Channels
    value: Channels


def same(channels: Channels) -> Part:
    """One rule for K and V."""
    return Part(channels, channels)


@dataclass(frozen=True)
class Parts:
    """A span's tokens in two parts. share: in front. energies, gains: of K and of V.

    short: `CacheSpec.short_foreground`, one pair or several. Long spans have whole tiles of tokens
    in front, since records of kernels are filled up.
    back: None for spans in one part. first: back of the first packed layer, if it is another one:
    channels of K without codes cost more there than in all other layers. Where that is the model's
    first layer, keys are of single tokens, of which none stands out. first_gains: gains of `first`,
    if they are others.
    """

    front: Part
    back: Part | None = None
    share: float = 3 / 8
    short: Steps | tuple[int, float] | None = None
    energies: tuple[float, float] = (1.0, 1.5)
    gains: tuple[float | str, float | str] = ("fit", "fit")
    first: Part | None = None
    first_gains: tuple[float | str, float | str] | None = None
    levels: str = "lloyd"

    @property
    def spec(self) -> CacheSpec:
        """Spec with scales and middles of levels in 8 bits."""
        rules = ()
        if self.first is not None:
            gains = self.first_gains or self.gains
            rules = (LayerRule(0, 1, background=self._policy(self.first, gains)),)
        return CacheSpec(
            visual=self._policy(self.front, self.gains),
            background=None if self.back is None else self._policy(self.back, self.gains),
            foreground=self.share,
            short_foreground=self.short,
            foreground_multiple=TILE if self.back is not None else 1,
            ranges="run",
            layers=rules,
        )

    def _policy(self, part: Part, gains: tuple[float | str, float | str]) -> KVSpec:
        channels = zip((part.key, part.value), self.energies, gains, strict=True)
        return KVSpec(*(self._tensor(*each) for each in channels))

    def _tensor(self, channels: Channels, energy: float, gain: float | str) -> TensorSpec:
        width = {"bits": channels} if isinstance(channels, int) else {"classes": channels}
        fitted = {"levels": self.levels, "energy": energy, "gain": gain}
        return TensorSpec(**width, **fitted, param_dtype="float8")


_SIGNS = ((1, 1 / 2),)
# By bits. V's gain is above its least squares: errors of V sum up over tokens, and what few levels
# lose of them is alike for all. K's is fitted, but for `first` at 1 bit: on one model of the zoo a
# fitted gain loses 1.6 times as much there (dev/log/quality.md).
PARTS = {
    1: Parts(
        front=Part(((4, 1 / 8), (2, 1 / 2), (1, 1 / 4)), ((2, 1 / 2), (1, 1 / 4))),
        back=Part(((4, 1 / 8), (2, 3 / 8)), _SIGNS),
        share=0.37,
        short=((60, 0.08), (112, 1.0)),
        gains=("fit", 1.2),
        first=Part(2, _SIGNS),
        first_gains=(1.1, 1.2),
    ),
    2: Parts(
        front=Part(((4, 1 / 2), (2, 1 / 2)), ((4, 1 / 4), (2, 3 / 4))),
        back=Part(((4, 1 / 8), (2, 1 / 2), (1, 1 / 4)), ((2, 1 / 4), (1, 3 / 4))),
        share=0.36,
        short=((60, 0.22), (112, 1.0)),
        gains=("fit", 1.1),
        first=Part(4, 2),
    ),
    3: Parts(
        front=same(4),
        back=Part(((4, 1 / 2), (2, 1 / 2)), ((4, 1 / 8), (2, 7 / 8))),
        share=0.3,
        gains=("fit", 1.05),
    ),
    4: Parts(front=same(4), back=same(4)),
}


def duotone(bits: int = 1) -> CacheSpec:
    """Spec chosen on models of `training.zoo`; it needs no data.

    Up to 4 bits, the tokens of a span that stand out have codes of their own. At 1 and 2 bits,
    spans of 60 to 111 tokens are not divided: a second part would spend too many bits on
    parameters. Up to 3, channels have unequal widths, ordered by their weighted variance. Levels
    are fitted to the tokens that stand out. A gain restores what tokens share and few levels lose:
    K's is fitted, V's lies above its least squares. Codes of 8 bits need one part and one width.
    Scales and middles of levels have 8 bits. Those of 8-bit codes have 16, since rounding would
    move levels by whole steps. So have layers whose keys have biases of several hundred (Qwen2.5);
    a cache finds them.
    """
    if bits in PARTS:
        return PARTS[bits].spec
    return _one_width(bits, "float8" if bits in FLOAT8_BITS else "float16")


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


def mixed(bits: int = 4, pictures: int = 2) -> CacheSpec:
    """Spec of whole conversations: `duotone` for pictures, `stream` for text and generated tokens.

    bits: of the stream. pictures: of `duotone`, for visual spans. Of eleven small models, none
    loses more by the default than by KIVI at 2 bits, beyond the interval. With 1 bit for pictures,
    three lose more about these (dev/log/quality.md). From 4 bits up the window has 32 tokens: such
    text loses little without a longer one.
    Errors: ValueError for widths that have no codes.
    """
    ok = is_count(pictures) and pictures in BITS
    require(
        ok, f"pictures must be one of {BITS}, the bits of duotone", pictures, "E.g. pictures=2."
    )
    text = stream(bits) if bits < 4 else stream(bits).replace(recent=32)
    return with_pictures(text, duotone(pictures))


def _shipped(name: str) -> CacheSpec:
    return CacheSpec.from_json((PRESETS / f"{name}.json").read_text(encoding="utf-8"))


def tuned() -> CacheSpec:
    """Spec that `duotone tune` chose for duotone-tiny's tasks (results/tune, docs/tune.md)."""
    return _shipped("duotone-tuned")


def klt() -> CacheSpec:
    """Spec that `duotone calibrate` made for duotone-tiny's three tasks (docs/calibrate.md)."""
    return _shipped("duotone-klt")
