"""Specs of schemes: frozen, JSON-safe data with no behaviour of its own.

`TensorSpec` fixes a quantizer of one tensor by independent choices. `KVSpec`, the policy of one
modality, has two of them. `CacheSpec` has a policy per modality, windows, and rules for layers. No
code asks which paper a spec came from, so every combination works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

from duotone.quant.bases import beside, with_files
from duotone.quant.eviction import Eviction
from duotone.quant.kv_spec import KVSpec as KVSpec
from duotone.quant.layer_rules import RULED
from duotone.quant.layer_rules import LayerRule as LayerRule
from duotone.quant.layer_rules import Sharing as Sharing
from duotone.quant.spec_base import (
    Record,
    decoded,
    is_count,
    is_number,
    is_word,
    of_policy,
    require,
    stored,
)
from duotone.quant.tensor_spec import TensorSpec as TensorSpec

# Pairs (tokens, share) for spans of fewer tokens, with rising tokens.
Steps = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class CacheSpec(Record):
    """A policy per modality in one cache.

    visual: KVSpec (each visual span is quantized once, whole, at prefill), "text" (visual tokens
        join the text stream) or "dense" (16 bit).
    text: KVSpec (a stream that leaves the window in whole groups) or "dense".
    background: KVSpec of the tokens of a visual span that stand out least, or None: `visual` is
        the policy of all. foreground: with a background, the share of a span's tokens that
        `visual` covers: the tokens that stand out most (`cache.saliency`). short_foreground:
        (tokens, share) for spans of fewer tokens, or None: parameters are more of their bits. A
        share of 1 divides none of these. Or several such pairs with rising tokens: a span takes
        the first with more tokens than its own. The field holds a tuple of pairs, even of one.
        foreground_multiple: spans of twice as many tokens or more have the nearest multiple of it
        in front, so that tiles of kernels are full.
    sink, recent: tokens of the stream that stay dense, the first ones and the last ones. The window
        is never shorter than `recent` once that many tokens exist; it floats up to one flush more.
    flush: least number of tokens that leave the window at a time, in whole groups. With recent=0
        the window then drains: it holds 0 to flush - 1 tokens (K in KIVI's and OScaR's code).
    tau: (tau1, tau2) of the score calibration on visual scores (CalibQuant eq. 7-8), or None.
    ranges: tokens that share one range: "sequence" (all of its visual tokens, the paper) or "run"
        (a contiguous run of them: an image, a frame).
    key_norm: divide the stream's keys by sqrt(max |k|) per channel before quantizing, and multiply
        the query instead (InnerQ sec. 4.3). The norm is per sequence and kv head, after RoPE.
    scale_keys: "auto" (keys are stored times a number per channel, and queries divided by it, so
        that errors matter alike to queries) or "never". Only layers with unequal channels are
        scaled, and only where a quantizer of K compares channels.
    layers: rules for some of the layers: other bits, other groups.
    share: cross-layer sharing of codes, or None.
    evict: tokens of the prompt to drop before the rest is stored, or None.
    """

    NEEDED: ClassVar = (("visual",),)
    GONE: ClassVar = {
        "dense_dtype": "Windows in 8-bit floats cost ten times KIVI's loss and are gone: leave the "
        "field out. A window of half as many recent tokens takes the same bytes in 16 bit."
    }

    visual: KVSpec | Literal["text", "dense"] = of_policy(default_factory=KVSpec)
    text: KVSpec | Literal["dense"] = of_policy("dense")
    background: KVSpec | None = of_policy(None)
    foreground: float = of_policy(0.5)
    short_foreground: Steps | tuple[int, float] | None = of_policy(None)
    foreground_multiple: int = of_policy(1)
    sink: int = of_policy(0)
    recent: int = of_policy(0)
    flush: int = of_policy(1)
    tau: tuple[float, float] | None = decoded(None)
    ranges: Literal["sequence", "run"] = stored("sequence")
    key_norm: bool = decoded(False)
    scale_keys: Literal["auto", "never"] = of_policy("auto")
    layers: tuple[LayerRule, ...] = of_policy(())
    share: Sharing | None = decoded(None)
    evict: Eviction | None = of_policy(None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-safe data; one pair of `short_foreground` stands alone."""
        data, short = super().to_dict(), self.short_steps
        return data | {"short_foreground": short[0]} if len(short) == 1 else data

    @classmethod
    def _of_folder(cls, data: Any, folder: Path) -> Any:
        return with_files(data, beside(folder))

    def __post_init__(self) -> None:
        self._normalise_policies()
        for name, least in (("sink", 0), ("recent", 0), ("flush", 1)):
            value = getattr(self, name)
            ok = is_count(value) and value >= least
            require(ok, f"{name} must be an integer >= {least}", value, "In tokens.")
        self._normalise_tau()
        ok = self.tau is None or isinstance(self.visual, KVSpec)
        remedy = "It calibrates the scores of packed visual tokens: give visual a KVSpec."
        require(ok, "tau needs quantized visual spans", self.visual, remedy)
        ok = is_word(self.ranges, ("sequence", "run"))
        require(ok, "ranges must be 'sequence' or 'run'", self.ranges, "Pick one of them.")
        require(isinstance(self.key_norm, bool), "key_norm must be a bool", self.key_norm, "")
        ok = not self.key_norm or isinstance(self.text, KVSpec)
        remedy = "It normalises the keys of the stream: give text a KVSpec."
        require(ok, "key_norm needs a quantized text stream", self.text, remedy)
        ok = is_word(self.scale_keys, ("auto", "never"))
        require(ok, "scale_keys must be 'auto' or 'never'", self.scale_keys, "Pick one of them.")
        self._normalise_layers()
        self._check_background()
        self._normalise_evict()
        for policy in (self.text, *(rule.text for rule in self.layers)):
            _check_text_groups(policy)
        spans = [kv for of in (self, *self.layers) for kv in (of.visual, of.background)]
        ok = not any(isinstance(kv, KVSpec) and kv.value.lag for kv in spans)
        require(ok, "only the V of text may lag", self.visual, "Spans are packed whole, at once.")
        ok = is_count(self.flush_tokens)
        remedy = "Whole groups of K and of V leave the window together: let one divide the other."
        require(ok, "groups must have a common multiple below 2**31", self.flush_tokens, remedy)

    def _normalise_policies(self) -> None:
        words_of = {"visual": ("text", "dense"), "text": ("dense",), "background": ()}
        for name, words in words_of.items():
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, KVSpec.from_dict(value))
            elif not isinstance(value, KVSpec):
                ok = is_word(value, words) or (value is None and name == "background")
                rule = f"CacheSpec.{name} must be a KVSpec or one of {words or (None,)}"
                require(ok, rule, value, "A policy per modality: see CacheSpec.")

    def _check_background(self) -> None:
        ok = is_number(self.foreground) and 0 < self.foreground < 1
        remedy = "It is a share of a span's tokens; background=None for none."
        require(ok, "foreground must lie in (0, 1)", self.foreground, remedy)
        self._normalise_short_foreground()
        ok = is_count(self.foreground_multiple) and self.foreground_multiple >= 1
        rule = "foreground_multiple must be an integer >= 1"
        require(ok, rule, self.foreground_multiple, "In tokens; 1 for any number of them.")
        ok = self.background is None or isinstance(self.visual, KVSpec)
        remedy = "A background is part of visual spans: give visual a KVSpec."
        require(ok, "a background needs quantized visual spans", self.visual, remedy)
        ok = self.background is None or self.share is None
        remedy = "Layers order their tokens by their own keys: share=None."
        require(ok, "a background and shared codes exclude each other", self.share, remedy)

    def _normalise_short_foreground(self) -> None:
        if self.short_foreground is None:
            return
        given: Any = self.short_foreground
        ok = isinstance(given, (tuple, list)) and len(given) > 0
        pairs = given if ok and isinstance(given[0], (tuple, list)) else (given,)
        rule = "short_foreground must be (tokens, share), a share in (0, 1], or None"
        remedy = "E.g. (128, 0.3) for spans of fewer than 128 tokens, or a tuple of such pairs."
        require(all(_is_step(pair) for pair in pairs), rule, given, remedy)
        ok = all(before[0] < after[0] for before, after in pairwise(pairs))
        remedy = "The first pair whose tokens exceed a span's counts."
        require(ok, "tokens of short_foreground must rise", given, remedy)
        object.__setattr__(self, "short_foreground", tuple(tuple(pair) for pair in pairs))

    @property
    def short_steps(self) -> Steps:
        """Pairs of `short_foreground`; () for None."""
        return self.short_foreground or ()  # type: ignore[return-value]

    def _share_in_front(self, tokens: int) -> float:
        shares = (share for fewer, share in self.short_steps if tokens < fewer)
        return next(shares, self.foreground)

    def foreground_of(self, tokens: int) -> int:
        """Tokens of a span's foreground: their share rounded up, or to the nearest multiple."""
        share, multiple = self._share_in_front(tokens), self.foreground_multiple
        front = share * tokens
        if multiple == 1 or tokens < 2 * multiple or share == 1:
            return math.ceil(front)
        most = (tokens - 1) // multiple
        return multiple * min(max(math.floor(front / multiple + 0.5), 1), most)

    def _normalise_tau(self) -> None:
        if self.tau is None:
            return
        ok = isinstance(self.tau, (tuple, list)) and len(self.tau) == 2
        ok = ok and all(is_number(t) and t >= 0 for t in self.tau)
        require(ok, "tau must be None or a pair of numbers >= 0", self.tau, "E.g. (0, 3).")
        object.__setattr__(self, "tau", tuple(float(t) for t in self.tau))

    def _normalise_layers(self) -> None:
        ok = isinstance(self.layers, (tuple, list))
        require(ok, "CacheSpec.layers must be a tuple of LayerRules", self.layers, "() for none.")
        made = tuple(LayerRule.from_dict(r) if isinstance(r, Mapping) else r for r in self.layers)
        ok = all(isinstance(rule, LayerRule) for rule in made)
        require(ok, "CacheSpec.layers must hold LayerRules", self.layers, "Or dicts of them.")
        object.__setattr__(self, "layers", made)
        for name in RULED:
            ruled = any(getattr(rule, name) is not None for rule in made)
            ok = not ruled or isinstance(getattr(self, name), KVSpec)
            remedy = f"Give the cache a KVSpec for {name} as well; rules only vary it."
            require(ok, f"a rule for {name} needs a quantized {name}", getattr(self, name), remedy)
        if isinstance(self.share, Mapping):
            object.__setattr__(self, "share", Sharing.from_dict(self.share))
        ok = self.share is None or isinstance(self.share, Sharing)
        require(ok, "CacheSpec.share must be a Sharing or None", self.share, "Or a dict of it.")

    def _normalise_evict(self) -> None:
        if isinstance(self.evict, Mapping):
            object.__setattr__(self, "evict", Eviction.from_dict(self.evict))
        ok = self.evict is None or isinstance(self.evict, Eviction)
        require(ok, "CacheSpec.evict must be an Eviction or None", self.evict, "Or a dict of it.")
        ok = self.evict is None or self.share is None
        remedy = "Layers drop different tokens, so one cannot read another's codes: share=None."
        require(ok, "eviction and shared codes exclude each other", self.share, remedy)

    @property
    def flush_tokens(self) -> int:
        """Tokens of the stream that leave the window at a time, in all layers together."""
        policies = (self.text, *(rule.text for rule in self.layers))
        groups = (p.flush_tokens for p in policies if isinstance(p, KVSpec))
        return math.lcm(self.flush, *groups)

    @property
    def tensors(self) -> list[TensorSpec]:
        """Quantizers of all layers, with repetitions."""
        policies = [getattr(of, name) for of in (self, *self.layers) for name in RULED]
        policies = [policy for policy in policies if isinstance(policy, KVSpec)]
        return [tensor for policy in policies for tensor in (policy.key, policy.value)]

    @property
    def tells_phases_apart(self) -> bool:
        """True where decoded tokens are quantized in another way than tokens of a prompt."""
        return any(tensor.hybrid_at == "prefill" for tensor in self.tensors)

    def at_layer(self, layer: int) -> CacheSpec:
        """Spec with the policies of one layer and no rules; one object for layers alike."""
        if not self.layers:
            return self
        numbers = tuple(n for n, rule in enumerate(self.layers) if rule.covers(layer))
        if numbers not in self._by_rules:
            self._by_rules[numbers] = self._ruled(numbers)
        return self._by_rules[numbers]

    @cached_property
    def _by_rules(self) -> dict[tuple[int, ...], CacheSpec]:
        return {}

    def _ruled(self, numbers: tuple[int, ...]) -> CacheSpec:
        policies = {name: getattr(self, name) for name in RULED}
        for rule in (self.layers[n] for n in numbers):
            own = {name: getattr(rule, name) for name in RULED}
            policies |= {name: value for name, value in own.items() if value is not None}
        return self.replace(**policies, layers=(), share=None)

    def source(self, which: Literal["key", "value"], layer: int, depth: int) -> int:
        """Layer whose codes of K or V `layer` reads in a model of `depth` layers."""
        return layer if self.share is None else self.share.source(which, layer, depth)

    def check_depth(self, depth: int) -> None:
        """Raise ValueError where rules or sharing do not fit a model of `depth` layers."""
        require(is_count(depth), "a model's depth must be an integer >= 0", depth, "Its layers.")
        remedy = "Was the spec made for a deeper model?"
        for rule in self.layers:
            ok = rule.start <= depth and (rule.stop is None or rule.stop <= depth)
            require(ok, f"rules must lie within {depth} layers", (rule.start, rule.stop), remedy)
        for which in ("key", "value"):
            first = None if self.share is None else getattr(self.share, which)
            ok = first is None or first <= depth
            require(ok, f"sharing must start within {depth} layers", (which, first), remedy)
            for layer in range(depth):
                self._check_share(which, layer, self.source(which, layer, depth))

    def _check_share(self, which: Literal["key", "value"], layer: int, source: int) -> None:
        mine, other = self.at_layer(layer), self.at_layer(source)
        for name in ("visual", "text"):
            policies = [getattr(spec, name) for spec in (mine, other)]
            if source == layer or not isinstance(policies[0], KVSpec):
                continue
            tensors = [getattr(policy, which) for policy in policies]
            formats = {(t.bits, t.along, t.group, t.mapping, t.classes, t.tile) for t in tensors}
            rule = "layers that share codes need equal bits, along, group and mapping"
            got = f"{which} of layer {layer}: {tensors[0].bits} bits, {source}: {tensors[1].bits}"
            require(len(formats) == 1, rule, got, "Let bits change between runs, e.g. an even kq.")
            ok = tensors[0].classes is None and tensors[0].mapping == "asymmetric"
            remedy = "Other formats store more than codes per layer."
            require(ok, "shared codes must be asymmetric, of one width", tensors[0], remedy)

    def nominal_bits(self, layers: int) -> float:
        """Bits of the codes of quantized tokens, averaged over `layers`: the papers' count.

        A layer that reads another one's codes counts 0 (XQuant App. A). The count leaves out
        scales, zero-points, signs and windows: see `MemoryReport`. Where tokens are evicted, a
        token counts by the share `keep` of such tokens that stay: 16 * keep for 16-bit tokens.
        """
        require(is_count(layers) and layers > 0, "layers must be >= 1", layers, "Model depth.")
        share = 1.0 if self.evict is None else self.evict.keep
        name = "visual" if isinstance(self.visual, KVSpec) else "text"
        if not isinstance(getattr(self, name), KVSpec):
            return 16.0 * share
        # Between two edges all layers have the same policies.
        ruled = {edge for rule in self.layers for edge in (rule.start, rule.stop) if edge}
        edges = sorted({0, layers} | {edge for edge in ruled if edge < layers})
        bits = [
            self.at_layer(start)._code_bits(name, which) * self._stored(which, start, stop, layers)
            for which in ("key", "value")
            for start, stop in pairwise(edges)
        ]
        return share * sum(bits) / (2 * layers)

    def _stored(self, which: Literal["key", "value"], start: int, stop: int, depth: int) -> int:
        """Layers of [start, stop) that store codes of K or V of their own."""
        if self.share is None:
            return stop - start
        before = (self.share.stored_before(which, layer, depth) for layer in (stop, start))
        return next(before) - next(before)

    def _code_bits(self, name: str, which: str) -> float:
        """Bits of K or V of one layer; a background counts by its share of the tokens."""
        bits = getattr(getattr(self, name), which).nominal_bits
        if name == "text" or self.background is None:
            return bits
        back = getattr(self.background, which).nominal_bits
        return self.foreground * bits + (1 - self.foreground) * back


def _is_step(pair: Any) -> bool:
    ok = isinstance(pair, (tuple, list)) and len(pair) == 2
    return ok and is_count(pair[0]) and is_number(pair[1]) and 0 < pair[1] <= 1


def _check_text_groups(policy: KVSpec | str | None) -> None:
    if not isinstance(policy, KVSpec):
        return
    for name in ("key", "value"):
        spec = getattr(policy, name)
        remedy = "A stream never ends, so 'the whole span' has no meaning: e.g. group=32."
        ok = spec.along == "channels" or spec.group is not None
        require(ok, f"text.{name} along tokens needs a group", spec.group, remedy)
        rule = f"text.{name} with balanced factors along channels needs a tile"
        require(spec.block_tokens is not None, rule, spec.tile, remedy.replace("group", "tile"))
