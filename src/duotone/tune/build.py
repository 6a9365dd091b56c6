"""A point of the space -> a `CacheSpec`. Pure; an invalid spec raises ValueError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from duotone.quant import CacheSpec, KVSpec, Sharing, TensorSpec
from duotone.quant.layer_rules import layer_rules
from duotone.quant.tensor_spec import FLOAT8_BITS

from .space import ETA_STEPS, SHARES

Counts = dict[int, int]  # width in bits -> sixteenths of the channels
WIDEST = 8
BACK = "_back"
# Order of the layers of K and of V: the layer that a coarse cache hurts most comes first.
Ranking = Mapping[str, Sequence[int]]


def counts_of(point: Mapping[str, Any], which: str) -> Counts:
    """{bits: sixteenths of the channels}: the rest after earlier shares bounds later shares.

    which: "key" or "value"; "key_back" or "value_back" of a background.
    """
    left, counts = SHARES, {}
    for name, width in zip(("first", "second", "third"), (1, 2, 4), strict=True):
        bits, share = point[f"{which}_top"] // width, min(left, point[f"{which}_{name}"])
        if bits and share:
            counts[bits] = share
            left -= share
    return counts


def boosted(counts: Counts) -> Counts:
    """About twice the code bits: every share twice as large; wider codes where there is no room."""
    if sum(counts.values()) == SHARES:
        return {_doubled(bits): share for bits, share in _merge(counts, 2)}
    left, doubled = SHARES, {}
    for bits, share in counts.items():
        doubled[bits] = min(left, 2 * share)
        left -= doubled[bits]
    return {bits: share for bits, share in doubled.items() if share}


def _doubled(bits: int) -> int:
    """Twice a width; 4 of 3, since there are no 6 bits."""
    return 4 if bits == 3 else min(WIDEST, 2 * bits)


def _merge(counts: Counts, factor: int) -> list[tuple[int, int]]:
    """Shares by width, with widths above the widest merged into the widest."""
    merged: Counts = {}
    for bits, share in counts.items():
        width = min(WIDEST // factor, bits)
        merged[width] = merged.get(width, 0) + share
    return list(merged.items())


def starved(counts: Counts) -> Counts:
    """About half the code bits: narrower codes where all channels have some, else half shares."""
    if sum(counts.values()) == SHARES and min(counts) > 1:
        return {bits // 2: share for bits, share in counts.items()}
    return {bits: (share + 1) // 2 for bits, share in counts.items()}


def _widths(counts: Counts, classes: bool) -> dict[str, Any]:
    """classes: unequal channels are possible; otherwise all channels have the widest codes."""
    if counts and (not classes or list(counts.values()) == [SHARES]):
        return {"bits": max(counts)}
    return {"classes": tuple((bits, share / SHARES) for bits, share in counts.items())}


def tensor_of(point: Mapping[str, Any], which: str, counts: Counts, eta: str = "eta") -> TensorSpec:
    """The quantizer of K or V with these widths; choices without effect are left out.

    eta: name of the dimension with the layer's eta.
    """

    def chosen(name: str) -> Any:
        return point[f"{which}_{name}"]

    fields = {name: chosen(name) for name in ("along", "mapping", "levels")}
    fields["group"] = chosen("group") or None
    fields["transform"] = None if chosen("transform") == "none" else chosen("transform")
    asymmetric = fields["mapping"] == "asymmetric"
    by_channel = asymmetric and fields["along"] == "tokens"
    fields |= _widths(counts, classes=by_channel)
    if asymmetric:
        fit = chosen("fit_gain") and by_channel
        fields["gain"] = "fit" if fit else round(chosen("gain"), 3)
    if by_channel:
        fields["energy"] = chosen("energy")
    if fields["levels"] == "uniform":
        fields["shrink"] = round(chosen("shrink"), 3)
    if by_channel and max(counts, default=0) in FLOAT8_BITS:
        fields["param_dtype"] = chosen("param_dtype")
    return TensorSpec(eta=chosen(eta) / ETA_STEPS, **fields)


def _is_after(point: Mapping[str, Any], which: str, layer: int) -> bool:
    """True for layers after the prefix of K or V."""
    return layer >= point[f"{which}_prefix"]


def _change(point: Mapping[str, Any], which: str, place: int, layer: int, layers: int) -> Counts:
    """Widths of a layer, which has `place` in the ranking."""
    counts = counts_of(point, which)
    which = which.removesuffix(BACK)
    if _is_after(point, which, layer):
        counts = starved(counts)
    if place < point[f"{which}_boosted"]:
        return boosted(counts)
    return starved(counts) if place >= layers - point[f"{which}_starved"] else counts


def policies(
    point: Mapping[str, Any], layers: int, ranking: Ranking, part: str = ""
) -> list[KVSpec]:
    """The quantizers of every layer. part: BACK for those of a background."""

    def tensor(which: str, place: int, layer: int) -> TensorSpec:
        eta = "eta_after" if _is_after(point, which, layer) else "eta"
        return tensor_of(point, which, _change(point, which + part, place, layer, layers), eta)

    tensors = {
        which: {layer: tensor(which, place, layer) for place, layer in enumerate(ranking[which])}
        for which in ("key", "value")
    }
    return [KVSpec(tensors["key"][i], tensors["value"][i]) for i in range(layers)]


def _text_stream(bits: int) -> KVSpec:
    """KIVI's axes for the text next to visual spans."""
    return KVSpec(
        TensorSpec(bits, along="tokens", group=32), TensorSpec(bits, along="channels", group=32)
    )


def _share(point: Mapping[str, Any], layers: int) -> Sharing | None:
    starts = [point.get(f"{which}_share_from", layers) for which in ("key", "value")]
    key, value = (start if start < layers else None for start in starts)
    return None if key is value is None else Sharing(key=key, value=value)


def natural_ranking(layers: int) -> Ranking:
    """Layers in model order, for K and V."""
    return {which: tuple(range(layers)) for which in ("key", "value")}


def spec_of(point: Mapping[str, Any], layers: int, ranking: Ranking | None = None) -> CacheSpec:
    """The spec of a point. Errors: ValueError where the choices contradict each other."""
    ranking = ranking or natural_ranking(layers)
    spans = point.get("policy", "stream") == "spans"
    parts = {"visual" if spans else "text": policies(point, layers, ranking)}
    foreground = point["foreground"] if spans else 0
    if foreground:
        parts["background"] = policies(point, layers, ranking, BACK)
    common, rules = layer_rules([{p: parts[p][i] for p in parts} for i in range(layers)])
    fields: dict[str, Any] = {"layers": rules, "share": _share(point, layers)}
    stream = {name: point[name] for name in ("sink", "recent", "flush", "key_norm")}
    if spans:
        tau = point["tau"]
        fields["tau"] = None if tau == "none" else tuple(float(t) for t in tau.split(","))
        text_bits = point.get("text_bits", 0)
        fields |= {**common, "ranges": point["ranges"]}
        fields |= {"foreground": foreground} if foreground else {}
        fields |= {"text": _text_stream(text_bits), **stream} if text_bits else {"text": "dense"}
    else:
        fields |= {"visual": "text", **common, **stream}
    return CacheSpec(**fields)
