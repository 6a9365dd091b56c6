"""Calibration: from batches to bases and to the spec that uses these bases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.hf.facts import ModelFacts, check_spec, model_facts
from duotone.hf.fingerprint import fingerprint
from duotone.loading import Loaded
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.bases import Bases, Reference
from duotone.quant.layer_rules import layer_rules
from duotone.report.provenance import stamp
from duotone.resume import Pace, Say, Unfinished, noted

from .moments import CalibrationBatch, LayerMoments, gather_moments
from .profiles import gather_profiles
from .settings import Settings
from .sums import ONLY, Sums, identity, unfinished
from .transform import Classes, Name, allocate, expected_error, klt, unit_sizes

RECENT = 128  # 16-bit tokens at the end of a text model's stream
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
    partial: str | Path | None = None,
    say: Say | None = None,
) -> tuple[Bases, CacheSpec, dict[str, Any]]:
    """(bases, spec, report) of a model, from the 16-bit cache's K, V and queries on `batches`.

    file: path of the bases, which the spec refers to. data: description of the batches, for the
    header. partial: a folder that sums are written to from time to time. After an interruption, a
    run with the same arguments goes on from it; `write` removes `partial_of(out)`. say: receives a
    sentence if this run goes on from a partial folder.
    Errors: ValueError for settings or a model that do not fit, or a partial folder of something
    else, before the model runs.
    """
    settings = settings or Settings()
    kept = {"partial": partial, "say": say}
    learned = learn(loaded, batches, settings, data=data, progress=progress, **kept)
    facts = model_facts(loaded.model)
    classes = learned.widths(settings)
    spec = spec_with(facts, classes, file, settings)
    check_spec(facts, spec)
    return learned.bases, spec, _report(learned, classes, settings)


@dataclass(frozen=True)
class Learned:
    """Statistics of a model on samples.

    moments: by layer. units: squared error at the attention's output per unit of coefficients'
    squares, by layer and tensor. shares: of the tokens, by part. spectra: mean over kv heads of the
    sorted variances of spans, in these units, by layer, tensor and part. foreground: the first
    part's share of K's energy, by layer.
    """

    moments: list[LayerMoments]
    bases: Bases
    units: dict[tuple[int, str], Units]
    shares: dict[str, float]
    spectra: dict[Name, Spectrum]
    foreground: dict[int, float]

    def widths(self, settings: Settings) -> dict[Name, Classes]:
        """Classes of every tensor, all layers under one budget."""
        return widths_of(self.spectra, settings, self.shares)


def learn(
    loaded: Loaded,
    batches: Sequence[CalibrationBatch],
    settings: Settings,
    *,
    data: Sequence[Mapping[str, Any]] = (),
    progress: Callable[[int, int], None] | None = None,
    partial: str | Path | None = None,
    say: Say | None = None,
) -> Learned:
    """Moments, bases and spectra of a model; arguments and errors as for `calibrate`."""
    facts = model_facts(loaded.model)
    settings.check(facts.head_dim)
    given = identity(loaded.model, batches, settings) if partial else {}
    passes = _Passes(len(batches), progress, unfinished(partial, given))
    passes.begin(say)
    with noted(passes.note):
        return _learned(loaded, facts, batches, settings, data, passes)


def _learned(
    loaded: Loaded,
    facts: ModelFacts,
    batches: Sequence[CalibrationBatch],
    settings: Settings,
    data: Sequence[Mapping[str, Any]],
    passes: _Passes,
) -> Learned:
    """Both passes: bases from the first, spectra from the second."""
    model, group, sums = loaded.model, settings.group, passes.sums
    begun = (sums.moments, sums.moments_batches)
    moments = gather_moments(model, batches, group, passes.first, *begun)
    _check_moments(moments, facts)
    header = _header(loaded, facts, moments, settings) | {"data": [dict(one) for one in data]}
    bases, units = bases_of(moments, settings, header)
    shares, begun = settings.parts(facts.is_multimodal), (sums.profiles, sums.profiles_batches)
    profiles = gather_profiles(model, batches, bases, shares, group, passes.second, *begun)
    variances = sorted(profiles.variances.items())
    spectra = {name: _in_unit(p, units[name[:2]]) for name, p in variances}
    return Learned(moments, bases, units, shares, spectra, profiles.foreground)


@dataclass
class _Passes:
    """Progress over both passes through the batches: moments, then profiles.

    in_file: batches of both passes whose sums are in the file.
    """

    batches: int
    progress: Callable[[int, int], None] | None
    kept: Unfinished
    sums: Sums = field(default_factory=Sums)
    pace: Pace = field(default_factory=Pace)
    in_file: int = 0

    def begin(self, say: Say | None) -> None:
        """Go on with the sums that an earlier run has left."""
        self.kept.check("remove the folder to begin again")
        if not self.kept.has(ONLY):
            return
        found = self.kept.read(ONLY)
        with self.kept.reading(ONLY):
            self.sums = Sums.restored(*found)
        self.in_file = self.sums.batches
        if say:
            say(self.kept.going_on(self.in_file, self.total))

    def first(self, done: int) -> None:
        self.sums.moments_batches = done
        self._after(done)

    def second(self, done: int) -> None:
        self.sums.profiles_batches = done
        self._after(done)

    def note(self) -> str | None:
        """Say what an interruption leaves."""
        return self.kept.note(self.in_file, self.total, self.sums.batches - self.in_file)

    def _after(self, done: int) -> None:
        if done == self.batches or self.pace.is_due():
            # The device may still be computing them: that is no time of writing.
            tensors = {name: tensor.cpu() for name, tensor in self.sums.tensors().items()}
            with self.pace.write():
                self.kept.keep(ONLY, self.sums.numbers(), tensors)
            self.in_file = self.sums.batches
        if self.progress:
            self.progress(self.sums.batches, self.total)

    @property
    def total(self) -> int:
        """Batches of both passes."""
        return 2 * self.batches


def _in_unit(profile: Float[Tensor, "kv_heads head_dim"], unit: Units) -> Spectrum:
    return (profile.double() * unit.to(profile.device)[:, None]).mean(0).cpu()


def bases_of(
    moments: Sequence[LayerMoments], settings: Settings, header: dict[str, Any]
) -> tuple[Bases, dict[tuple[int, str], Units]]:
    """All layers' bases, and the weight of a unit of coefficients' squares, by layer and tensor."""
    names = [(i, which) for i in range(len(moments)) for which in ("key", "value")]
    made = {(i, which): _basis(moments[i], which, settings) for i, which in names}
    stacked = {
        which: torch.stack([basis for (_, w), (_, basis) in made.items() if w == which]).float()
        for which in ("key", "value")
    }
    return Bases(**stacked, header=header), {name: unit for name, (unit, _) in made.items()}


def widths_of(
    spectra: Mapping[Name, Spectrum], settings: Settings, shares: Mapping[str, float]
) -> dict[Name, Classes]:
    """Classes of every tensor by `allocate`. shares: of the tokens, by part."""
    tensors, parts = settings.tensor_weights, settings.part_weights(shares)
    return allocate(
        spectra,
        settings.bits,
        settings.widths,
        settings.unit,
        {name: tensors[name[1]] * parts[name[2]] for name in spectra},
        {name: shares[name[2]] for name in spectra},
    )


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
    moments: LayerMoments, which: Literal["key", "value"], settings: Settings
) -> tuple[Units, Float[Tensor, "kv_heads head_dim head_dim"]]:
    """(weight of a unit at the attention's output, per kv head; E), on the CPU.

    E belongs to the metric with a mean diagonal of 1, so that coefficients stay in the range of
    16-bit scales. The unit is the metric's level and makes all tensors comparable. An error dv in V
    of a token of probability p changes the output by p W_o dv. An error dk in K is ds = sm_scale q
    . dk in the score, and changes the output by p ds W_o (v - o). The mean square of W_o (v - o) is
    tr(M S), with M the metric and S the covariance of V.
    """
    metric = moments.scores if which == "key" else moments.output
    level = metric.diagonal(dim1=-2, dim2=-1).mean(-1)
    unit_metric = metric / torch.where(level > 0, level, 1.0)[:, None, None]
    covariance = moments.covariance(which)
    _, basis = klt(covariance, unit_metric, settings.regularization, settings.mix)
    if which == "key":
        level = level * (moments.output * moments.covariance("value")).sum((-2, -1))
        level = level / moments.groups
    return level.cpu(), basis.cpu()


def spec_with(
    facts: ModelFacts, classes: Mapping[Name, Classes], file: str, settings: Settings
) -> CacheSpec:
    """A rule per layer: visual spans of a multimodal model, else the stream of text."""
    shares = settings.parts(facts.is_multimodal)
    stream = {} if facts.is_multimodal else {"group": settings.group}

    def tensor(layer: int, which: Literal["key", "value"], part: str) -> TensorSpec:
        transform = str(Reference(file, layer, which))
        own = {"classes": classes[layer, which, part], "transform": transform}
        return settings.quantizer(which, "background" in shares).replace(**own, **stream)

    def policies(layer: int) -> dict[str, KVSpec]:
        return {p: KVSpec(tensor(layer, "key", p), tensor(layer, "value", p)) for p in shares}

    common, rules = layer_rules([policies(layer) for layer in range(facts.layers)])
    if not facts.is_multimodal:
        return CacheSpec(visual="text", **common, recent=RECENT, layers=rules)
    parted = {"foreground": settings.foreground} if "background" in shares else {}
    return CacheSpec(**common, **parted, ranges="run", layers=rules)


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
        "queries": moments[0].queries,
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
    head_dim = len(next(iter(spectra.values())))
    spent = sum(row["bits"] * row["share"] for row in rows)
    return {
        "header": dict(learned.bases.header),
        "bits": spent / sum(row["share"] for row in rows),
        "unit": unit_sizes(head_dim, settings.unit)[0],
        "tensors": rows,
    }
