"""`TensorSpec`: the choices that fix the quantizer of one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from duotone.quant.bases import Reference
from duotone.quant.spec_base import Record, decoded, is_count, is_number, is_word, require, stored

BITS = (1, 2, 3, 4, 8)
PARAM_DTYPES = ("float16", "bfloat16", "float32", "float8")
# Widths of codes whose parameters may have 8 bits.
FLOAT8_BITS = (1, 2, 3, 4)
# Widths that `quant.codebooks` has.
CODEBOOK_BITS = (1, 2, 3, 4)


@dataclass(frozen=True)
class TensorSpec(Record):
    """Quantizer of one tensor x [..., tokens, channels], `x_hat = codes * scale + zero_point`.

    bits: width of a code (1, 2, 3, 4, 8; Triton has no 3 and leaves it to the reference). A
        symmetric group stores a sign bit beside it.
    along: the axis whose elements share one scale: "tokens" (a scale per channel), "channels"
        (a scale per token), or "span" (one scale for all of a group's tokens and channels:
        the "global" row of CalibQuant's Table 4).
    group: elements of that axis per scale; None is the whole span (or the whole head_dim).
    mapping: "asymmetric" (zero_point = minimum), "symmetric" (sign and magnitude, InnerQ eq. 12),
        or "hybrid" (per group the one with the lower sum of absolute errors, InnerQ sec. 4.2).
    hybrid_at: where a hybrid compares: "always", or at "prefill" only. Groups that leave the window
        while decoding are then all symmetric, in the hybrid's layout, and cost one quantizer
        instead of two (InnerQ's hybrid-prefill). A later turn's chunk of tokens is a prefill.
    shrink: end points times this before quantizing, about zero (CalibQuant's released code).
    eta: end points moved inwards after quantizing; codes do not change (XQuant eq. 12). An element
        at an end point is off by eta of the group's width. Groups along channels that outliers make
        wide keep their end points (`levels.keeps_ends`).
    levels: "uniform" (end points at min and max) or "lloyd" (end points that minimise the squared
        error of the group; at 1 bit the two conditional means).
    gain: levels scaled about the group's mean, `x_hat <- mean + gain * (x_hat - mean)`. A number,
        or "fit": one gain per block from the block's own covariances (`ranges.fitted_gain`).
    classes: channels of unequal bits, or None. ((4, 1/8), (2, 1/4)): in every block the eighth of
        the channels with the largest variance gets 4 bits, the next quarter 2, the others only
        their mean. Reverse water-filling on the block's own variances, with the counts fixed so
        that a kernel knows the layout; replaces `bits`. Along tokens, asymmetric.
    energy: tokens count by this power of their energy about the block's mean, in the variances that
        order the channels and in a last least-squares fit of each channel's levels about the mean
        (before `gain`). Attention picks tokens that stand out; 0 lets all count alike and fits
        nothing. Along tokens, asymmetric.
    transform: None, or "hadamard": channels are turned by a Hadamard matrix before quantization and
        q (for K) or the output (for V) by the same one while decoding. Or "klt:FILE#LAYER.key" (or
        .value): by a matrix per kv head that `duotone calibrate` found (`quant.bases`). Costs no
        bytes and two products of head_dim x head_dim per step and head.
    clip: numbers beyond this share of a token's channels, by magnitude, become the largest one
        within it before quantization (OSCAR); 1 clips nothing. Along channels.
    ends: "range" of a group, or "deviations" from its mean: steps of .98 of them, the edges of
        Lloyd-Max cells (OSCAR's code). Of 2 bits; `levels`, `shrink` and `eta` have no part in it.
    grid: "free", or "zero": zero_point is a whole number of steps, so that a level is exactly 0
        (integer zero-points, as OScaR has them).
    ties: code of a number in the middle of two levels: the upper one ("up") or the even one
        ("even"). The code of KIVI, CalibQuant, OScaR and KVarN has the latter.
    heads: "each" kv head has parameters of its own; "all" have one range along="span" (V's in
        CalibQuant's released code without channels).
    codebook: "uniform" steps, or "gaussian": Lloyd-Max levels of a unit Gaussian times one scale,
        which keeps the norm of a group (TurboQuant). Of mapping="symmetric", without planes of
        signs: codes count all levels upwards.
    factors: numbers by which x is divided before groups are made (`quant.factors`), or None.
        "norm": of each token, over all kv heads. "balanced": deviations of a tile's tokens and
        channels. One per token, or with along="channels" one per channel and tile.
    tile: tokens of a tile with along="channels"; None: the whole span. Along tokens it is `group`.
    lag: newest tokens of a stream, those of the window included, whose exact numbers attention
        reads, packed or not (`cache.lag`). Of V alone, along channels.
    jensen: scores of these keys are lowered by half of the variance that rounding adds to them,
        sum over channels of (q scale)^2 / 24. For exp is convex, and noise that does not depend on
        the keys would raise their weights on average (arXiv 2605.26266). Of K alone.
    param_dtype: how scale and zero_point are stored. "float8": in 8 bits with an exponent per block
        (`quant.small_floats`), the middle of the levels in place of zero_point. Levels are found in
        fp16 and then rounded; codes stay. Along tokens, asymmetric, for codes of up to 4 bits:
        rounding moves ends of more levels by whole steps.
    """

    NEEDED: ClassVar = (("bits", "classes"),)

    bits: int = decoded(1)
    along: Literal["tokens", "channels", "span"] = decoded("tokens")
    group: int | None = decoded(None)
    mapping: Literal["asymmetric", "symmetric", "hybrid"] = decoded("asymmetric")
    hybrid_at: Literal["always", "prefill"] = stored("always")
    eta: float = stored(0.0)
    shrink: float = stored(1.0)
    levels: Literal["uniform", "lloyd"] = stored("uniform")
    gain: float | Literal["fit"] = stored(1.0)
    classes: tuple[tuple[int, float], ...] | None = decoded(None)
    energy: float = stored(0.0)
    transform: str | None = decoded(None)
    param_dtype: Literal["float16", "bfloat16", "float32", "float8"] = decoded("float16")
    clip: float = stored(1.0)
    ends: Literal["range", "deviations"] = stored("range")
    grid: Literal["free", "zero"] = stored("free")
    ties: Literal["up", "even"] = stored("up")
    heads: Literal["each", "all"] = stored("each")
    codebook: Literal["uniform", "gaussian"] = decoded("uniform")
    factors: Literal["norm", "balanced"] | None = decoded(None)
    tile: int | None = decoded(None)
    lag: int = decoded(0)
    jensen: bool = decoded(False)

    def __post_init__(self) -> None:
        ok = is_count(self.bits) and self.bits in BITS
        require(ok, f"bits must be one of {BITS}", self.bits, "Pick one of them.")
        self._check_choice("along", ("tokens", "channels", "span"))
        self._check_choice("mapping", ("asymmetric", "symmetric", "hybrid"))
        self._check_choice("hybrid_at", ("always", "prefill"))
        ok = self.hybrid_at == "always" or self.mapping == "hybrid"
        remedy = "Other mappings have nothing to compare."
        require(ok, "hybrid_at='prefill' needs mapping='hybrid'", self.mapping, remedy)
        self._check_choice("levels", ("uniform", "lloyd"))
        self._check_choice("param_dtype", PARAM_DTYPES)
        ok = self.group is None or (is_count(self.group) and self.group > 0)
        require(ok, "group must be a positive integer or None", self.group, "None: whole span.")
        ok = is_number(self.eta) and 0 <= self.eta < 0.5
        require(ok, "eta must lie in [0, 0.5)", self.eta, "At 0.5 all levels would meet.")
        ok = is_number(self.shrink) and 0 < self.shrink <= 1
        require(ok, "shrink must lie in (0, 1]", self.shrink, "1.0 switches it off.")
        self._check_gain()
        self._check_classes()
        self._check_energy()
        self._check_transform()
        self._check_float8()
        self._check_clip()
        self._check_ends()
        self._check_grid()
        self._check_ties()
        self._check_heads()
        self._check_lag()
        self._check_codebook()
        self._check_factors()

    def _check_gain(self) -> None:
        fit = is_word(self.gain, ("fit",))
        ok = fit or (is_number(self.gain) and self.gain > 0)
        require(ok, "gain must be positive or 'fit'", self.gain, "1.0 switches it off.")
        ok = self.gain == 1 or self.mapping == "asymmetric"
        remedy = "Symmetric levels have no zero_point to hold the mean: use mapping='asymmetric'."
        require(ok, "gain != 1 needs mapping='asymmetric'", self.mapping, remedy)
        remedy = "Along channels or the span a block has no covariance between channels."
        require(
            not fit or self.along == "tokens", "gain='fit' needs along='tokens'", self.along, remedy
        )

    def _check_classes(self) -> None:
        if self.classes is None:
            return
        rule = f"classes must be 1 to 3 pairs (bits, share) with bits falling, out of {BITS}"
        ok = isinstance(self.classes, (tuple, list))
        ok = ok and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in self.classes)
        require(ok, rule, self.classes, "E.g. ((4, 1/8), (2, 1/4)).")
        pairs = tuple((bits, share) for bits, share in self.classes)
        widths = [bits for bits, _ in pairs]
        ok = 1 <= len(pairs) <= 3 and all(is_count(b) and b in BITS for b in widths)
        ok = ok and widths == sorted(set(widths), reverse=True)
        require(ok, rule, self.classes, "E.g. ((4, 1/8), (2, 1/4)).")
        ok = all(is_number(share) and share > 0 for _, share in pairs)
        ok = ok and sum(share for _, share in pairs) <= 1
        remedy = "What is left over gets 0 bits: its mean."
        require(ok, "shares of classes must be positive and sum to at most 1", pairs, remedy)
        ok = self.along == "tokens" and self.mapping == "asymmetric"
        remedy = "Variances are taken along tokens and 0 bits need a zero_point."
        require(ok, "classes need along='tokens', mapping='asymmetric'", self.along, remedy)
        object.__setattr__(self, "classes", pairs)

    def _check_energy(self) -> None:
        ok = is_number(self.energy) and 0 <= self.energy <= 2
        require(ok, "energy must lie in [0, 2]", self.energy, "0 switches it off.")
        ok = not self.energy or (self.along == "tokens" and self.mapping == "asymmetric")
        remedy = "Tokens are weighed against each other in the statistics along tokens."
        require(ok, "energy needs along='tokens', mapping='asymmetric'", self.along, remedy)

    def _check_float8(self) -> None:
        if self.param_dtype != "float8":
            return
        ok = self.along == "tokens" and self.mapping == "asymmetric"
        remedy = "Channels of a block share an exponent."
        rule = "param_dtype='float8' needs along='tokens', mapping='asymmetric'"
        require(ok, rule, (self.along, self.mapping), remedy)
        widths = [bits for bits, _ in self.classes] if self.classes else [self.bits]
        rule = f"param_dtype='float8' needs codes of {FLOAT8_BITS} bits"
        require(set(widths) <= set(FLOAT8_BITS), rule, widths, "Use param_dtype='float16'.")

    def _check_transform(self) -> None:
        known = self.transform is None or is_word(self.transform, ("hadamard",))
        ok = known or (isinstance(self.transform, str) and Reference.parse(self.transform))
        rule = "transform must be None, 'hadamard' or 'klt:FILE#LAYER.key' (or .value)"
        remedy = "duotone calibrate writes specs with such references."
        require(bool(ok), rule, self.transform, remedy)

    def _check_clip(self) -> None:
        ok = is_number(self.clip) and 0 < self.clip <= 1
        require(ok, "clip must lie in (0, 1]", self.clip, "1.0 switches it off.")
        ok = self.clip == 1 or self.along == "channels"
        require(ok, "clip != 1 needs along='channels'", self.along, "It ranks a token's channels.")

    def _check_ends(self) -> None:
        self._check_choice("ends", ("range", "deviations"))
        plain = self.levels == "uniform" and self.shrink == 1 and self.eta == 0
        ok = self.bits == 2 and self.classes is None and self.mapping == "asymmetric" and plain
        ok = ok or self.ends == "range"
        remedy = "Asymmetric, uniform levels, no classes; gain moves them."
        require(ok, "ends='deviations' needs plain codes of 2 bits", self.bits, remedy)

    def _check_grid(self) -> None:
        self._check_choice("grid", ("free", "zero"))
        if self.grid == "free":
            return
        ok = self.mapping == "asymmetric" and self.param_dtype != "float8"
        remedy = "It rounds zero-points, and they are stored as such: param_dtype='float16'."
        require(ok, "grid='zero' needs mapping='asymmetric'", self.mapping, remedy)
        moved = (self.eta, self.gain, self.energy)
        remedy = "They move levels off the grid."
        require(moved == (0, 1, 0), "grid='zero' needs eta=0, gain=1, energy=0", moved, remedy)

    def _check_ties(self) -> None:
        self._check_choice("ties", ("up", "even"))
        ok = self.ties == "up" or self.codebook == "uniform"
        require(
            ok, "ties='even' needs codebook='uniform'", self.codebook, "Its codes have no step."
        )

    def _check_heads(self) -> None:
        self._check_choice("heads", ("each", "all"))
        ok = self.heads == "each" or self.along == "span"
        require(ok, "heads='all' needs along='span'", self.along, "Channels are a head's own.")

    def _check_lag(self) -> None:
        ok = is_count(self.lag) and (not self.lag or self.along == "channels")
        remedy = "A token's parameters must be its own: along='channels'."
        require(ok, "lag must be an integer >= 0, of tokens", self.lag, remedy)

    def _check_codebook(self) -> None:
        self._check_choice("codebook", ("uniform", "gaussian"))
        require(isinstance(self.jensen, bool), "jensen must be a bool", self.jensen, "")
        if self.codebook == "uniform":
            return
        ok = self.mapping == "symmetric" and self.bits in CODEBOOK_BITS
        rule = f"codebook='gaussian' needs mapping='symmetric' and {CODEBOOK_BITS} bits"
        require(ok, rule, (self.mapping, self.bits), "It has levels of both signs.")
        plain = self.eta == 0 and self.shrink == 1 and self.levels == "uniform"
        moved = (self.eta, self.shrink, self.levels)
        require(plain, "a codebook needs eta=0, shrink=1, levels='uniform'", moved, "It is fixed.")
        require(not self.jensen, "jensen needs codebook='uniform'", self.codebook, "One step.")

    def _check_factors(self) -> None:
        ok = self.factors is None or is_word(self.factors, ("norm", "balanced"))
        require(ok, "factors must be None, 'norm' or 'balanced'", self.factors, "Pick one of them.")
        along = {"norm": ("tokens",), "balanced": ("tokens", "channels")}.get(self.factors or "")
        ok = along is None or self.along in along
        require(ok, f"factors={self.factors!r} needs along in {along}", self.along, "Or None.")
        ok = self.factors is None or self.param_dtype != "float8"
        remedy = "Factors are stored as parameters are: param_dtype='float16'."
        require(ok, "factors need parameters of 16 bits or more", self.param_dtype, remedy)
        ok = self.tile is None or (is_count(self.tile) and self.tile > 0)
        require(ok, "tile must be a positive integer or None", self.tile, "None: whole span.")
        ok = self.tile is None or (self.factors == "balanced" and self.along == "channels")
        remedy = "Along tokens a group is the tile."
        require(ok, "tile needs factors='balanced', along='channels'", self.factors, remedy)

    @property
    def block_tokens(self) -> int | None:
        """Tokens whose parameters are found together; None: of the whole span."""
        return 1 if self.along == "channels" and self.factors is None else self.row_tokens

    @property
    def row_tokens(self) -> int | None:
        """Tokens of a block, which has one row of parameters or factors; None: the whole span."""
        return self.tile if self.along == "channels" else self.group

    @property
    def nominal_bits(self) -> float:
        """Bits of the codes alone, averaged over channels."""
        return sum(bits * share for bits, share in self.classes) if self.classes else self.bits

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        require(
            is_word(value, choices), f"{name} must be one of {choices}", value, "Pick one of them."
        )
