"""Calibration: from batches to bases and to the spec that uses these bases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

import duotone
from duotone.hf.model.facts import ModelFacts, model_facts
from duotone.hf.model.fingerprint import fingerprint
from duotone.hf.model.key_scales import key_scales
from duotone.hf.model.spec_checks import check_spec
from duotone.loading import Loaded
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.accounting import span_bits
from duotone.quant.bases import Bases, Reference
from duotone.quant.layer_rules import layer_rules
from duotone.quant.tensor_spec import FLOAT8_BITS
from duotone.report.provenance import stamp

from .budget import most, widths_of
from .gains import nearest
from .lengths import check_lengths
from .moments import CalibrationBatch, LayerMoments, facts_of, gather_moments
from .profiles import gather_profiles
from .settings import SINK, Settings
from .transform import Classes, Name, expected_error, klt, least_bits, level_of, outliers

PASSES = 2  # over the batches: moments, then profiles
SUMS = ("key", "value", "query", "output")
Spectrum = Float[Tensor, " head_dim"]
Units = Float[Tensor, " kv_heads"]


def calibrate(
    loaded: Loaded,
    batches: Sequence[CalibrationBatch],
    settings: Settings | None = None,
    *,
    file: str = "calibrated.safetensors",
    data: Sequence[Mapping[str, Any]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Bases, CacheSpec, dict[str, Any]]:
    """(bases, spec, report) of a model, from the 16-bit cache's K, V and queries on `batches`.

    file: path of the bases, which the spec refers to. data: description of the batches, for the
    header. progress: called with (done, total) batches of both passes.
    Errors: ValueError for settings or a model that do not fit, before the model runs.
    """
    settings = settings or Settings()
    learned = learn(loaded, batches, settings, data=data, progress=progress)
    facts = facts_of(loaded.model, batches)
    classes = learned.widths(settings)
    specs = {
        gain: spec_with(facts, classes, file, replace(settings, gain=gain))
        for gain in gains_of(settings, facts)
    }
    for spec in specs.values():
        check_spec(facts, spec)
    gain, *others = specs
    if others:
        gain = nearest(loaded.model, learned.bases, specs, batches)
    report = _report(learned, classes, settings) | {"gain": gain}
    return learned.bases, specs[gain], report


def gains_of(settings: Settings, facts: ModelFacts) -> list[Any]:
    """Gains of V's levels to choose among: of whole spans, if the settings leave it open."""
    is_open = settings.gain is None and settings.parts(facts).keys() == {"visual"}
    return [None, "fit"] if is_open else [settings.gain]


@dataclass(frozen=True)
class Learned:
    """Statistics of a model on samples.

    moments: by layer. units: squared error at the attention's output per unit of coefficients'
    squares, by layer and tensor. shares: of the tokens, by part. spectra: mean over kv heads of the
    sorted variances of spans, in these units, by layer, tensor and part. facts: of the model.
    """

    moments: list[LayerMoments]
    bases: Bases
    units: dict[tuple[int, str], Units]
    shares: dict[str, float]
    spectra: dict[Name, Spectrum]
    facts: ModelFacts

    def widths(self, settings: Settings) -> dict[Name, Classes]:
        """Classes of every tensor, all layers under one budget."""
        codes = partial(widths_of, self.spectra, shares=self.shares, layers=self.weights)
        if "text" in self.shares:
            return codes(settings.code_bits(self.shares))
        if settings.bits is not None:
            return codes(settings.bits, tokens=self.span_tokens)
        return self._as_large_as_preset(codes, settings)

    def _as_large_as_preset(self, codes: Callable[[float], Any], settings: Settings) -> Any:
        """Classes of the most codes whose spans are no larger than those of `duotone@1`."""
        channels = self.facts.shape.head_dim
        size = (max(1, round(self.span_tokens)), channels, self.facts.layers)
        preset = span_bits(duotone.scheme("duotone", bits=1), *size)

        def fits(_: float, classes: Mapping[Name, Classes]) -> bool:
            return span_bits(spec_with(self.facts, classes, "bases", settings), *size) <= preset

        return most(codes, fits, least_bits(channels), preset)

    @property
    def weights(self) -> list[float]:
        """Factors of the layers' errors (`LayerMoments.weight`)."""
        return [layer.weight for layer in self.moments]

    @property
    def span_tokens(self) -> float:
        """Mean tokens of a span."""
        return span_tokens(self.moments)


def span_tokens(moments: Sequence[LayerMoments]) -> float:
    """Mean tokens of a span; all layers see the same ones."""
    return moments[0].tokens / moments[0].spans


def learn(
    loaded: Loaded,
    batches: Sequence[CalibrationBatch],
    settings: Settings,
    *,
    data: Sequence[Mapping[str, Any]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Learned:
    """Moments, bases and spectra of a model; arguments and errors as for `calibrate`.

    Bases come from the first pass over the batches, spectra from the second.
    """
    model = loaded.model
    check_settings(model, settings)
    facts = facts_of(model, batches)
    check_lengths(model, batches, facts, settings)
    first, second = (_passing(number, len(batches), progress) for number in range(PASSES))
    group = settings.group_of(facts)
    moments = gather_moments(model, batches, group, first)
    _check_moments(moments, facts)
    header = _header(loaded, facts, moments, settings) | {"data": [dict(one) for one in data]}
    scales = key_scales(model, facts, duotone.scheme("duotone", bits=1))
    floor = settings.floor(settings.parts(facts))
    bases, units = bases_of(moments, floor, header, scales)
    shares = settings.shares(facts, span_tokens(moments))
    variances = gather_profiles(model, batches, bases, shares, group, second)
    spectra = {name: _in_unit(p, units[name[:2]]) for name, p in sorted(variances.items())}
    return Learned(moments, bases, units, shares, spectra, facts)


def check_settings(model: Any, settings: Settings) -> None:
    """Raise ValueError for a model or settings that do not fit, whatever the samples are."""
    # Which tokens are visual is the samples' business.
    facts = model_facts(model, visual_mask=torch.zeros(1, 1, dtype=torch.bool))
    settings.check(facts.shape.head_dim)
    if any(facts.sliding) and "background" in settings.parts(facts):
        raise ValueError(
            "spans in two parts need layers whose queries see all of a picture; got "
            f"{facts.model_type!r}, with windows or an indexer. Calibrate spans in one part: "
            "duotone calibrate --foreground 0, or Settings(foreground=None)"
        )


def _passing(
    number: int, batches: int, progress: Callable[[int, int], None] | None
) -> Callable[[int], None] | None:
    """Progress of one pass over the batches, as progress of all passes; None for none."""
    if progress is None:
        return None
    return lambda done: progress(number * batches + done, PASSES * batches)


def _in_unit(profile: Float[Tensor, "kv_heads head_dim"], unit: Units) -> Spectrum:
    return (profile.double() * unit.to(profile.device)[:, None]).mean(0).cpu()


def bases_of(
    moments: Sequence[LayerMoments],
    regularization: float,
    header: dict[str, Any],
    scales: Sequence[Tensor | None],
) -> tuple[Bases, dict[tuple[int, str], Units]]:
    """All layers' bases, and the weight of a unit of coefficients' squares, by layer and tensor.

    scales: sizes of the queries that read each layer's keys [kv_heads, 1, head_dim], by the weights
    (`hf.model.key_scales`); None: about equal ones.
    """
    names = [(i, which) for i in range(len(moments)) for which in ("key", "value")]
    made = {(i, which): _basis(moments[i], which, regularization, scales[i]) for i, which in names}
    stacked = {
        which: torch.stack([basis for (_, w), (_, basis) in made.items() if w == which]).float()
        for which in ("key", "value")
    }
    return Bases(**stacked, header=header), {name: unit for name, (unit, _) in made.items()}


def _check_moments(moments: Sequence[LayerMoments], facts: ModelFacts) -> None:
    if len(moments) != facts.layers:
        raise ValueError(
            f"attention of {facts.layers} layers must be seen, got {len(moments)}: do all layers "
            f"of {facts.model_type!r} go through transformers' attention interface?"
        )
    if not all(layer.tokens and layer.queries for layer in moments):
        raise ValueError("bases need tokens to learn from, got none; give samples with pictures")
    for index, layer in enumerate(moments):
        if not all(bool(getattr(layer, name).isfinite().all()) for name in SUMS):
            raise ValueError(f"K, V and queries must be finite, layer {index}'s are not")


def _basis(
    moments: LayerMoments,
    which: Literal["key", "value"],
    regularization: float,
    scales: Tensor | None,
) -> tuple[Units, Float[Tensor, "kv_heads head_dim head_dim"]]:
    """(weight of a unit at the attention's output, per kv head; E), on the CPU.

    E belongs to the metric with a level of 1, so that coefficients stay in the range of
    16-bit scales. The unit is the metric's level and makes all tensors comparable. An error dv in V
    of a token of probability p changes the output by p W_o dv. An error dk in K is ds = sm_scale q
    . dk in the score, and changes the output by p ds W_o (v - o). The mean square of W_o (v - o) is
    tr(M S), with M the metric and S the covariance of V.
    """
    metric = moments.scores if which == "key" else moments.output
    if which == "key":
        units = None if scales is None else outliers(scales[:, 0].double())
    else:
        units = outliers(metric.diagonal(dim1=-2, dim2=-1).sqrt())
    level = level_of(metric, units)
    unit_metric = metric / torch.where(level > 0, level, 1.0)[:, None, None]
    covariance = moments.covariance(which)
    _, basis = klt(covariance, unit_metric, regularization, units)
    if which == "key":
        level = level * (moments.output * moments.covariance("value")).sum((-2, -1))
        level = level / moments.groups
    return level.cpu(), basis.cpu()


def spec_with(
    facts: ModelFacts, classes: Mapping[Name, Classes], file: str, settings: Settings
) -> CacheSpec:
    """A rule per layer, of visual spans or of the stream of text (`Settings.is_text`)."""
    shares, is_text = settings.parts(facts), settings.is_text(facts)
    stream = {"group": settings.group} if is_text else {}

    def tensor(layer: int, which: Literal["key", "value"], part: str) -> TensorSpec:
        transform = str(Reference(file, layer, which))
        own = {"classes": classes[layer, which, part], "transform": transform, **stream}
        is_small = {bits for bits, _ in own["classes"]} <= set(FLOAT8_BITS)
        own |= {"param_dtype": "float8"} if is_small else {}
        return settings.quantizer(which, shares).replace(**own)

    def policies(layer: int) -> dict[str, KVSpec]:
        return {p: KVSpec(tensor(layer, "key", p), tensor(layer, "value", p)) for p in shares}

    common, rules = layer_rules([policies(layer) for layer in range(facts.layers)])
    if is_text:
        window = {"sink": SINK, "recent": settings.recent}
        return CacheSpec(visual="text", **common, **window, layers=rules)
    return CacheSpec(**common, **settings.division(facts), ranges="run", layers=rules)


def _header(
    loaded: Loaded, facts: ModelFacts, moments: Sequence[LayerMoments], settings: Settings
) -> dict[str, Any]:
    """Header of the bases: their model and their origin."""
    model = loaded.model
    return {
        "fingerprint": fingerprint(model),
        "model": loaded.name,
        **facts.signature(),
        "tokens": moments[0].tokens,
        "spans": moments[0].spans,
        "queries": moments[0].queries,
        "layer_weights": [float(f"{layer.weight:.4g}") for layer in moments],
        "settings": settings.to_dict(),
        **stamp(model.device),
    }


def _report(
    learned: Learned, classes: Mapping[Name, Classes], settings: Settings
) -> dict[str, Any]:
    """The header, the bits spent, and each tensor's classes and its share of error and variance.

    error: expected of Gaussian coefficients; 1 bit for all channels would keep 0.36 of `variance`.
    """
    spectra, shares = learned.spectra, learned.shares
    rows = [
        {
            "layer": layer,
            "which": which,
            "part": part,
            "share": shares[part],
            "classes": [list(pair) for pair in chosen],
            "bits": sum(bits * share for bits, share in chosen),
            "variance": float(spectra[layer, which, part].sum()),
            "error": expected_error(spectra[layer, which, part], chosen),
        }
        for (layer, which, part), chosen in classes.items()
    ]
    spent = sum(row["bits"] * row["share"] for row in rows)
    return {
        "header": dict(learned.bases.header),
        "bits": spent / sum(row["share"] for row in rows),
        "tensors": rows,
    }
