"""The end of a calibration: its spec against presets, on samples that it never saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import duotone
from duotone import CacheSpec
from duotone.hf.model.facts import ModelFacts
from duotone.loading import Loaded
from duotone.planning.memory import plan
from duotone.quant.bases import Bases
from duotone.tune.batches import PromptCounts, prompt_counts, ready
from duotone.tune.objective import Ready
from duotone.tune.seeds import fits
from duotone.tune.trials import Lost, Meter, Rival, mean
from duotone.tune.verdict import Verdict, verdict

from .answers import without_tokens
from .gains import elsewhere
from .moments import CalibrationBatch, facts_of

CALIBRATED = "calibrated"
# Presets that need no data, and their bits. A calibration takes the bits of `duotone@1` or a little
# less: presets of up to `NEAR` times its bits count as equal, and more are not measured.
PRESETS = {
    "calibquant": (1, 2, 4),
    "minmax": (1, 2, 4),
    "lloyd": (1, 2, 4),
    "duotone": (1, 2, 4),
    "duotone-whole": (1, 2),
}
STREAMS = {"kivi": (1, 2, 4), "innerq": (2, 4), "duotone-stream": (1, 2, 4)}
NEAR, TENFOLD = 1.02, 1.0
HeldOut = Mapping[str, Sequence[CalibrationBatch]]
Progress = Callable[[int, int], None]


def compare(
    loaded: Loaded,
    bases: Bases,
    spec: CacheSpec,
    heldout: HeldOut,
    *,
    keep_found: bool = False,
    progress: Progress | None = None,
) -> tuple[Verdict, CacheSpec]:
    """(verdict, the spec to use) of a calibrated spec and presets of as many true bits or less.

    heldout: {task: batches}, none of which the calibration saw. keep_found: the calibrated spec is
    kept whatever was measured. progress: called with (done, total) batches and specs.
    Errors: ValueError where the samples prove nothing of the calibrated spec.
    """
    facts = facts_of(loaded.model, [batch for _, batch in _flat(heldout)])
    encoded = [batch.tensors for batches in heldout.values() for batch in batches]
    counts = prompt_counts(loaded, encoded)
    total = len(encoded) + 1
    prepared: dict[str, list[Ready]] = {name: [] for name in heldout}
    for done, (name, batch) in enumerate(_flat(heldout), start=1):
        with without_tokens(loaded.model, batch.never):
            prepared[name].append(ready(loaded.model, batch.tensors, batch.answer_tokens))
        _say(progress, done, total)
    of = "visual" if counts.all_pictured and spec.visual != "text" else "cache"
    meter = Meter(loaded.model, prepared, of)
    with TemporaryDirectory() as folder:
        measured, parts = meter.measured(elsewhere(bases, spec, Path(folder)))
    rows = {CALIBRATED: measured}
    found = verdict(CALIBRATED, {CALIBRATED: spec}, rows, ())
    longest = max(batch.answer_tokens for _, batch in _flat(heldout))
    known = presets_near(facts, spec, counts, longest, found.found.bits)
    for done, (name, preset) in enumerate(known.items(), start=len(encoded) + 1):
        with suppress(Lost):
            rows[name] = meter.measured(preset, _far_from(parts, len(heldout)))[0]
        _say(progress, done, len(encoded) + len(known))
    specs = {CALIBRATED: spec, **known}
    limit = NEAR * found.found.bits
    end = verdict(CALIBRATED, specs, rows, known, limit=limit, asked=keep_found)
    return end, specs[end.kept]


def _far_from(parts: Sequence[float], tasks: int) -> Rival:
    """A rule that ends a preset's measurement where it is far from 16 bit.

    parts: log10 KL of the calibrated spec by batch. A hundredfold after any batch; tenfold once
    every task had one.
    """

    def reason(bits: float, so_far: Sequence[float]) -> str | None:
        further = mean(so_far) - mean(parts[: len(so_far)])
        allowed = TENFOLD if len(so_far) >= tasks else 2 * TENFOLD
        return "further away" if further > allowed and len(so_far) < len(parts) else None

    return reason


def _flat(heldout: HeldOut) -> list[tuple[str, CalibrationBatch]]:
    return [(name, batch) for name, batches in heldout.items() for batch in batches]


def _say(progress: Progress | None, done: int, total: int) -> None:
    if progress:
        progress(done, total)


def presets_near(
    facts: ModelFacts, spec: CacheSpec, counts: PromptCounts, answer: int, bits: float
) -> dict[str, CacheSpec]:
    """{label: spec} of presets for the same tokens that are planned to take about `bits` or less.

    They are of visual spans where the spec has some, else streams, with `answer` tokens of an
    answer after the prompt. Streams with a longer window are taken with the spec's window, too.
    """
    streams = spec.visual == "text"
    of_stream = {"text_tokens": counts.text, "new_tokens": answer - 1}
    tokens = of_stream if streams else {"visual_tokens": counts.visual}
    found: dict[CacheSpec, str] = {}
    for name, widths in (STREAMS if streams else PRESETS).items():
        for width in widths:
            preset = duotone.scheme(name, bits=width)
            known = {f"{name} @{width}": preset}
            if streams and preset.recent > spec.recent:
                label = f"{name} @{width}, recent {spec.recent}"
                known[label] = preset.replace(recent=spec.recent, sink=spec.sink)
            for label, one in known.items():
                if fits(facts, one) and plan(facts, one, **tokens).bits_per_element < NEAR * bits:
                    found.setdefault(one, label)
    return {label: preset for preset, label in found.items()}
