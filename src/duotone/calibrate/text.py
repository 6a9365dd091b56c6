"""Text and answers beside calibrated pictures: calibrated too, or as in another scheme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duotone.hf.model.spec_checks import check_spec
from duotone.loading import Loaded
from duotone.quant import CacheSpec, KVSpec
from duotone.quant.layer_rules import RULED, layer_rules
from duotone.quant.our_schemes import with_pictures

from .data import CalibrationData, calibration_data, usual_samples
from .lengths import check_lengths
from .moments import CalibrationBatch, facts_of
from .run import check_settings
from .settings import TEXT_BITS, Settings
from .written import Written

CALIBRATED = "calibrated"


def text_settings(name: str, settings: Settings) -> Settings | None:
    """Settings of calibrated text by its name, "calibrated@2" or "calibrated"; None of other names.

    settings: of the pictures, whose constants of streams hold. Errors: ValueError for other bits.
    """
    kind, at, bits = name.partition("@")
    if kind != CALIBRATED:
        return None
    try:
        codes = float(bits) if at else TEXT_BITS
    except ValueError as error:
        raise ValueError(
            f"calibrated text has code bits after its @, e.g. calibrated@1.5; got {name!r}"
        ) from error
    return Settings(bits=codes, group=settings.group, recent=settings.recent, text=True)


def check_text(spec: CacheSpec) -> None:
    """Raise ValueError for schemes whose text cannot stand beside pictures of another scheme."""
    if not isinstance(spec.text, KVSpec):
        raise ValueError(
            f"text beside pictures must be of a scheme that quantizes text, got {spec.text!r}; "
            "take duotone-mixed@4, or leave --text out for 16 bit"
        )
    if any(rule.text is not None for rule in spec.layers):
        raise ValueError(
            "text beside pictures must have one quantizer in all layers, got rules for layers; "
            "take a scheme without them, e.g. duotone-mixed@4"
        )
    if spec.share is not None:
        raise ValueError(
            f"text beside pictures must have codes of its own in all layers, got {spec.share}; "
            "take a scheme without shared codes, e.g. duotone-mixed@4"
        )


def check_has_pictures(
    model: Any, batches: Sequence[CalibrationBatch], spec: CacheSpec | None = None
) -> None:
    """Raise ValueError for a model without pictures, or one that cannot have this text."""
    facts = facts_of(model, batches)
    if not facts.is_multimodal:
        raise no_pictures(facts.model_type)
    if spec is not None:
        check_spec(facts, spec)


def no_pictures(name: str | None) -> ValueError:
    """Return the error of text beside pictures for a model of this name that takes none."""
    return ValueError(
        f"text beside pictures needs a model with pictures, got {name!r}, whose text is "
        "calibrated itself; leave --text out"
    )


def written_data(
    loaded: Loaded,
    task: Written,
    settings: Settings,
    samples: int | None = None,
    batch_size: int = 4,
    heldout: int = 0,
) -> CalibrationData:
    """Text that a model with pictures writes itself; arguments as for `calibration_data`.

    samples: None for as many as usual. Errors: ValueError for settings that do not fit the model,
    and where a stream of such text would never be packed.
    """
    check_settings(loaded.model, settings)
    count = usual_samples([task]) if samples is None else samples
    data = calibration_data(loaded, [task], count, batch_size, heldout, text=True)
    check_lengths(loaded.model, data.batches, facts_of(loaded.model, data.batches), settings)
    return data


def joined(text: CacheSpec, pictures: CacheSpec, layers: int) -> CacheSpec:
    """Spec with the stream of one spec and the visual spans of another, layer by layer.

    Both may have rules for some of the `layers`. Window and sinks are those of `text`.
    """
    each = [(text.at_layer(layer), pictures.at_layer(layer)) for layer in range(layers)]
    halves = [
        {name: getattr(words if name == "text" else spans, name) for name in RULED}
        for words, spans in each
    ]
    common, rules = layer_rules(halves)
    whole = with_pictures(text.replace(layers=()), pictures.replace(layers=()))
    return whole.replace(**common, layers=rules)
