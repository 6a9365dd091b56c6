"""Errors of schemes in attention: scores, weights and outputs against the 16-bit cache.

A prompt's cache is quantized as in use (`QuantizedCache.absorb`), and the recorded queries of
question and answer attend to the quantized cache. So the measured error is one layer's, without the
errors of earlier layers. K and V of the answer stay in 16 bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from duotone.cache.ledger import Ledger
from duotone.calibrate.moments import CalibrationBatch
from duotone.hf.calibrated import check_bases
from duotone.hf.facts import check_spec, model_facts
from duotone.inference.batch import Batch
from duotone.quant import CacheSpec

from .answered import Answered, packed_tokens, sequences
from .histogram import Histogram
from .queries import QueryRecorder
from .scores import Compared, compare

Schemes = Mapping[str, CacheSpec]
Tau = tuple[float, float] | None


def check_schemes(model: Any, batches: Sequence[CalibrationBatch], schemes: Schemes) -> None:
    """Raise ValueError for schemes whose errors on these prompts cannot be measured."""
    facts = model_facts(model)
    if schemes and any(facts.sliding):
        raise ValueError(
            "errors of attention need layers whose 16-bit cache keeps all tokens, got sliding "
            f"windows in {facts.model_type!r}; leave --scheme out for the spectra alone"
        )
    for label, spec in schemes.items():
        check_spec(facts, spec)
        check_bases(model, facts, spec)
        if spec.evict is not None:
            raise ValueError(
                f"a scheme must keep all tokens to be compared token by token, {label!r} evicts "
                "some; score it by duotone evaluate"
            )
        if not facts.is_multimodal and not any(_packs(spec, batch) for batch in batches):
            raise ValueError(
                f"{label!r} must pack some of the prompts' tokens, got prompts that it keeps in 16 "
                "bit as a whole; give longer samples or a scheme with a shorter window"
            )


def _packs(spec: CacheSpec, batch: CalibrationBatch) -> bool:
    """True if some token of a text model's prompts leaves the window."""
    real = batch.tensors["attention_mask"].bool()
    ledger = Ledger(spec, len(real), real.device)
    ledger.plan(torch.zeros_like(real), real)
    return bool(packed_tokens(ledger.state, real.shape[1]).any())


@dataclass
class LayerErrors:
    """Sums over samples of one layer's errors. exact, scores: histograms over the shown tokens."""

    exact: Histogram = field(default_factory=Histogram)
    scores: Histogram = field(default_factory=Histogram)
    weights_mse: float = 0.0
    output_error: float = 0.0
    samples: int = 0

    def add(self, found: Compared) -> None:
        """Add one more sample."""
        self.exact.add(found.exact)
        self.scores.add(found.scores)
        self.weights_mse += found.weights_mse
        self.output_error += found.output_error
        self.samples += 1

    def to_dict(self) -> dict[str, Any]:
        """Means over samples, JSON-safe."""
        count = max(self.samples, 1)
        return {
            "weights_mse": self.weights_mse / count,
            "output_error": self.output_error / count,
            "samples": self.samples,
            "exact": self.exact.to_dict(),
            "scores": self.scores.to_dict(),
        }


def views(label: str, spec: CacheSpec) -> dict[str, Tau]:
    """{label: tau}: a scheme with score calibration is also measured without it."""
    return {label: None} if spec.tau is None else {f"{label}, no tau": None, label: spec.tau}


class ErrorMeter:
    """Meter of schemes' errors in attention while a model is calibrated: an `Audience`.

    Errors: ValueError as for `check_schemes`.
    """

    def __init__(self, model: Any, batches: Sequence[CalibrationBatch], schemes: Schemes) -> None:
        check_schemes(model, batches, schemes)
        self.model, self.schemes = model, schemes
        self.recorder = QueryRecorder(model_facts(model))
        every = [view for scheme in schemes.items() for view in views(*scheme)]
        depth = self.recorder.facts.layers
        self.sums = {view: [LayerErrors() for _ in range(depth)] for view in every}

    @torch.inference_mode()
    def see(self, batch: Batch, cache: Any) -> None:
        """Add one batch under every scheme."""
        answered = Answered(batch, cache, self.recorder)
        for label, spec in self.schemes.items():
            quantized = answered.quantized(self.model, spec)
            try:
                self._add(answered, quantized, views(label, spec))
            finally:
                quantized.detach()

    def _add(self, answered: Answered, cache: Any, taus: Mapping[str, Tau]) -> None:
        """Add one batch under one scheme, layer by layer."""
        for layer in range(self.recorder.facts.layers):
            for exact, coded, shown in sequences(answered, cache, layer):
                for view, tau in taus.items():
                    found = compare(exact, exact.coded(*coded, tau), shown)
                    self.sums[view][layer].add(found)

    def entries(self) -> list[dict[str, Any]]:
        """One JSON-safe entry per scheme (two where it has a tau), each with a row per layer.

        Scores are of the visual tokens, in a text model of the packed ones.
        """
        return [
            {
                "label": view,
                "scheme": label,
                "tau": tau and list(tau),
                "layers": [layer.to_dict() for layer in self.sums[view]],
            }
            for label, spec in self.schemes.items()
            for view, tau in views(label, spec).items()
        ]
