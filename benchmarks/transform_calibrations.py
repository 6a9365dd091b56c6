"""Calibrated specs by the dozen: moments once, then bases and widths for every variant."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from duotone import CacheSpec
from duotone.calibrate import CalibrationBatch, Settings, calibration_data, gather_moments
from duotone.calibrate.moments import LayerMoments
from duotone.calibrate.profiles import gather_profiles
from duotone.calibrate.run import bases_of, spec_with, widths_of
from duotone.hf.facts import model_facts
from duotone.hf.fingerprint import fingerprint
from duotone.loading import Loaded
from duotone.quant.bases import Bases
from duotone.tasks import TASKS

Moments = Sequence[LayerMoments]


class Calibrator:
    """Batches of every task, and what was gathered from them. folder: for the files of bases."""

    def __init__(self, loaded: Loaded, samples: int, batch_size: int, folder: Path) -> None:
        self.loaded, self.folder = loaded, folder
        self.data = {
            name: calibration_data(loaded, [TASKS[name]], samples, batch_size) for name in TASKS
        }
        self.batches = [b for data in self.data.values() for b in data.batches]
        self.moments = gather_moments(loaded.model, self.batches)

    def some(self, samples: int, tasks: Sequence[str] | None = None) -> list[CalibrationBatch]:
        """The first samples of every task."""
        found = []
        for name in tasks or self.data:
            left = samples
            for batch in self.data[name].batches:
                if left > 0:
                    cut = {key: _first(t, batch, left) for key, t in batch.tensors.items()}
                    found.append(CalibrationBatch(cut, batch.answer_tokens))
                    left -= len(cut["input_ids"])
        return found

    def spec(
        self,
        label: str,
        settings: Settings,
        *,
        batches: Sequence[CalibrationBatch] | None = None,
        moments: Moments | None = None,
        alter: Callable[[Bases], Bases] | None = None,
    ) -> CacheSpec:
        """A spec whose bases lie in `folder`.

        batches: others than all. moments: others than theirs. alter: changes the bases.
        """
        model, facts = self.loaded.model, model_facts(self.loaded.model)
        if moments is None:
            moments = self.moments if batches is None else gather_moments(model, batches)
        batches = self.batches if batches is None else batches
        bases, units = bases_of(moments, settings, {"fingerprint": fingerprint(model)})
        bases = alter(bases) if alter else bases
        file = self.folder / (label.translate(str.maketrans(" ,/.", "____")) + ".safetensors")
        bases.save(file)
        shares = settings.parts(facts.is_multimodal)
        profiles = gather_profiles(model, batches, bases, shares, settings.group).variances
        spectra = {
            name: (profile.cpu() * units[name[:2]][:, None]).mean(0)
            for name, profile in sorted(profiles.items())
        }
        return spec_with(facts, widths_of(spectra, settings, shares), str(file), settings)


def _first(tensor: torch.Tensor, batch: CalibrationBatch, count: int) -> torch.Tensor:
    """Of a batch's tensor what belongs to its first sequences; pictures come in their order."""
    return tensor[: min(count, len(batch.tensors["input_ids"])) * _rows(tensor, batch)]


def _rows(tensor: torch.Tensor, batch: CalibrationBatch) -> int:
    return len(tensor) // len(batch.tensors["input_ids"])


def each(change: Callable[[torch.Tensor, str], torch.Tensor], moments: Moments) -> Moments:
    """Moments with their sums changed: change(sum [kv_heads, d, d], its name)."""
    made = []
    for layer in moments:
        fields: dict[str, Any] = dict(vars(layer))
        fields |= {name: change(fields[name], name) for name in ("key", "value", "query", "output")}
        made.append(LayerMoments(**fields))
    return made


def per_layer(moments: Moments) -> Moments:
    """One basis for all kv heads of a layer."""
    return each(lambda m, _: m.mean(0, keepdim=True).expand_as(m), moments)


def per_pair(moments: Moments) -> Moments:
    """One basis for two layers that follow each other."""
    made = list(moments)
    for i in range(0, len(made) - 1, 2):
        both = made[i : i + 2]
        for place, other in ((i, both[1]), (i + 1, both[0])):
            (made[place],) = each(
                lambda m, name, other=other: (m + getattr(other, name).to(m)) / 2,
                [both[place - i]],
            )
    return made


def within_pairs(moments: Moments) -> Moments:
    """K's statistics within RoPE's pairs of channels alone: no basis mixes frequencies."""

    def cut(m: torch.Tensor, name: str) -> torch.Tensor:
        pair = torch.arange(m.shape[-1], device=m.device) % (m.shape[-1] // 2)
        mixed = name in ("key", "query") and pair[:, None] != pair
        return m.masked_fill(mixed, 0) if name in ("key", "query") else m

    return each(cut, moments)


def log_compressed(moments: Moments) -> Moments:
    """The queries' spectrum on a logarithmic scale (SMAQ's cure): log(1 + l / mean l)."""

    def squeeze(m: torch.Tensor, name: str) -> torch.Tensor:
        if name != "query":
            return m
        values, vectors = torch.linalg.eigh(m)
        level = values.mean(-1, keepdim=True)
        return vectors * (level * torch.log1p(values / level))[:, None] @ vectors.mT

    return each(squeeze, moments)


def identity(bases: Bases) -> Bases:
    """No basis: only widths by one budget."""
    eye = torch.eye(bases.key.shape[-1])
    return Bases(eye.expand_as(bases.key), eye.expand_as(bases.value), bases.header)


def hadamard(bases: Bases) -> Bases:
    """The same rotation for all."""
    from duotone.quant.rotation import hadamard as matrix

    turned = matrix(bases.key.shape[-1]).float()
    return Bases(turned.expand_as(bases.key), turned.expand_as(bases.value), bases.header)
