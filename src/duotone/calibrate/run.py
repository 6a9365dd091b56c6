"""From batches to bases and to the spec that uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.hf.facts import ModelFacts, check_spec, model_facts
from duotone.hf.fingerprint import fingerprint
from duotone.loading import Loaded
from duotone.provenance import stamp
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.bases import Bases, Reference
from duotone.tune.build import layer_rules

from .moments import CalibrationBatch, LayerMoments, gather_moments
from .transform import WIDTHS, Classes, Name, allocate, expected_error, klt, unit_sizes

# As in the data-free preset, whose constants were chosen on calibration samples.
KEY = TensorSpec(levels="lloyd", gain="fit", energy=1.0)
VALUE = TensorSpec(levels="lloyd", energy=1.5)
# {mean bits up to here: how far V's levels move apart}: few levels lose what tokens share.
VALUE_GAINS = {1.5: 1.25, 2.5: 1.1}
RECENT = 128  # 16-bit tokens at the end of a text model's stream
SUMS = ("key", "value", "query", "output")
Spectrum = Float[Tensor, " head_dim"]


@dataclass(frozen=True)
class Settings:
    """What a calibration is free to choose.

    bits: mean over the channels of all layers' K and V; widths, unit: see `allocate`.
    regularization, mix: of the metrics, see `klt`. key_weight, value_weight: factors of their
    errors. key, value: quantizers that get classes and a transform. value_gain: of the latter;
    None: by `bits`. group: tokens of a text stream's span.
    """

    bits: float = 1.0
    widths: tuple[int, ...] = WIDTHS
    unit: int | None = None
    regularization: float = 0.01
    mix: float = 0.0
    key_weight: float = 1.0
    value_weight: float = 1.0
    key: TensorSpec = KEY
    value: TensorSpec = VALUE
    value_gain: float | None = None
    group: int = 128

    def check(self, head_dim: int) -> None:
        """Raise ValueError for what no calibration of heads of this size can do."""
        for name in ("regularization", "mix", "key_weight", "value_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not self.mix <= 1:
            raise ValueError(f"mix must lie in [0, 1], got {self.mix}")
        allocate({(0, "key"): torch.ones(head_dim)}, self.bits, self.widths, self.unit)

    def quantizer(self, which: Literal["key", "value"]) -> TensorSpec:
        """What gets classes and a transform."""
        if which == "key":
            return self.key
        by_bits = next((gain for most, gain in VALUE_GAINS.items() if self.bits <= most), 1.0)
        return self.value.replace(gain=by_bits if self.value_gain is None else self.value_gain)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe fields."""
        return asdict(self)


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

    file: where the bases will lie; the spec refers to it. data: what the batches are, for the
    header. Errors: ValueError for settings or a model that do not fit, before the model runs.
    """
    settings = settings or Settings()
    facts = model_facts(loaded.model)
    settings.check(facts.head_dim)
    report_done = progress and (lambda done: progress(done, len(batches)))
    moments = gather_moments(loaded.model, batches, settings.group, report_done)
    _check_moments(moments, facts)
    header = _header(loaded, facts, moments, settings) | {"data": [dict(one) for one in data]}
    bases, spectra = bases_of(moments, settings, header)
    classes = widths_of(spectra, settings)
    spec = spec_with(facts, classes, file, settings)
    check_spec(facts, spec)
    return bases, spec, _report(header, spectra, classes, settings)


def bases_of(
    moments: Sequence[LayerMoments], settings: Settings, header: dict[str, Any]
) -> tuple[Bases, dict[Name, Spectrum]]:
    """All layers' bases, and their spectra in one unit."""
    names = [(i, which) for i in range(len(moments)) for which in ("key", "value")]
    made = {(i, which): _basis(moments[i], which, settings) for i, which in names}
    stacked = {
        which: torch.stack([basis for (_, w), (_, basis) in made.items() if w == which]).float()
        for which in ("key", "value")
    }
    return Bases(**stacked, header=header), {name: spectrum for name, (spectrum, _) in made.items()}


def widths_of(spectra: Mapping[Name, Spectrum], settings: Settings) -> dict[Name, Classes]:
    """Classes of every tensor by `allocate`."""
    weights = {"key": settings.key_weight, "value": settings.value_weight}
    return allocate(spectra, settings.bits, settings.widths, settings.unit, weights)


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
) -> tuple[Spectrum, Float[Tensor, "kv_heads head_dim head_dim"]]:
    """(spectrum in units of the attention's output, mean over kv heads; E), on the CPU.

    E is that of the metric with a mean diagonal of 1, so that coefficients stay in the range of
    16-bit scales. The spectrum has the metric's level back, and is comparable between all tensors:
    wrong by dv, a token of probability p changes the output by p W_o dv; wrong by dk, which is
    ds = sm_scale q . dk in its score, by p ds W_o (v - o). Of W_o (v - o) the mean square is
    tr(M S), with M the metric and S the covariance of V.
    """
    metric = moments.scores if which == "key" else moments.output
    level = metric.diagonal(dim1=-2, dim2=-1).mean(-1)
    unit_metric = metric / torch.where(level > 0, level, 1.0)[:, None, None]
    covariance = moments.covariance(which)
    spectrum, basis = klt(covariance, unit_metric, settings.regularization, settings.mix)
    spectrum = spectrum * level[:, None]
    if which == "key":
        heard = (moments.output * moments.covariance("value")).sum((-2, -1)) / moments.groups
        spectrum = spectrum * heard[:, None]
    return spectrum.mean(0).cpu(), basis.cpu()


def spec_with(
    facts: ModelFacts, classes: Mapping[Name, Classes], file: str, settings: Settings
) -> CacheSpec:
    """A rule per layer: visual spans of a multimodal model, else the stream of text."""
    stream = {} if facts.is_multimodal else {"group": settings.group}

    def tensor(layer: int, which: Literal["key", "value"]) -> TensorSpec:
        transform = str(Reference(file, layer, which))
        own = {"classes": classes[layer, which], "transform": transform}
        return settings.quantizer(which).replace(**own, **stream)

    kinds = [KVSpec(tensor(i, "key"), tensor(i, "value")) for i in range(facts.layers)]
    policy, rules = layer_rules(kinds, "visual" if facts.is_multimodal else "text")
    if facts.is_multimodal:
        return CacheSpec(visual=policy, text="dense", ranges="run", layers=rules)
    return CacheSpec(visual="text", text=policy, recent=RECENT, layers=rules)


def _header(
    loaded: Loaded, facts: ModelFacts, moments: Sequence[LayerMoments], settings: Settings
) -> dict[str, Any]:
    """What the bases belong to and where they come from."""
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
    header: Mapping[str, Any],
    spectra: Mapping[Name, Spectrum],
    classes: Mapping[Name, Classes],
    settings: Settings,
) -> dict[str, Any]:
    """The header, what was spent, and per tensor its classes and its share of error and variance.

    error: expected of Gaussian coefficients; 1 bit for all channels would keep 0.36 of `variance`.
    """
    rows = [
        {
            "layer": layer,
            "which": which,
            "classes": [list(pair) for pair in chosen],
            "bits": sum(bits * share for bits, share in chosen),
            "variance": float(spectra[layer, which].sum()),
            "error": expected_error(spectra[layer, which], chosen),
        }
        for (layer, which), chosen in classes.items()
    ]
    head_dim = len(next(iter(spectra.values())))
    return {
        "header": dict(header),
        "bits": sum(row["bits"] for row in rows) / len(rows),
        "unit": unit_sizes(head_dim, settings.unit)[0],
        "tensors": rows,
    }


def write(bases: Bases, spec: CacheSpec, out: str | Path) -> tuple[Path, Path]:
    """Write the bases and the spec beside them. Errors: ValueError for files that exist."""
    files = check_files(out)
    bases.save(files[0])
    files[1].write_text(spec.to_json() + "\n", encoding="utf-8")
    return files


def files_of(out: str | Path) -> tuple[Path, Path]:
    """OUT.safetensors and OUT.json; OUT may name either."""
    text = str(out)
    for suffix in (".safetensors", ".json"):
        text = text.removesuffix(suffix)
    return Path(text + ".safetensors"), Path(text + ".json")


def check_files(out: str | Path) -> tuple[Path, Path]:
    """Both files, which do not exist yet and can be written. Errors: ValueError."""
    files = files_of(out)
    found = [str(path) for path in files if path.exists()]
    if found:
        raise ValueError(
            f"files are never overwritten, got the existing {', '.join(found)}; move them away or "
            "give another --out"
        )
    try:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        files[0].touch()
        files[0].unlink()
    except OSError as error:
        raise ValueError(
            f"--out must be a path that can be written, got {str(out)!r}: {error}"
        ) from error
    return files
