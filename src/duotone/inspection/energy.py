"""How much of what keys say is said by few tokens: the foreground's share of their energy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from duotone.cache.blocks import BlockTable
from duotone.cache.prominence import prominence_order
from duotone.cache.ragged import select
from duotone.calibrate.moments import CalibrationBatch, Places
from duotone.calibrate.profiles import blocks_of, into_coefficients, read_prompts
from duotone.hf.facts import ModelFacts, model_facts
from duotone.quant.bases import Bases

Heads = Float[Tensor, "batch heads tokens head_dim"]
Energies = Float[Tensor, "2"]


def energies(
    coefficients: Float[Tensor, "batch kv_heads tokens head_dim"], blocks: BlockTable, share: float
) -> Energies:
    """(energy of the foreground, of all tokens), summed over spans and heads.

    A token's energy is its prominence |c - mean|^2, the mean that of its span; the foreground are
    the ceil(share n) tokens of a span that `prominence_order` puts first.
    """
    order = prominence_order(coefficients, blocks)[..., None]
    slots = blocks.to_slots(coefficients.gather(2, order.expand_as(coefficients)))
    mask, sizes = blocks.mask[:, None, ..., None], blocks.sizes
    slots = slots.masked_fill(~mask, 0)
    mean = slots.sum(3, keepdim=True) / sizes[:, None, :, None, None].clamp_min(1)
    energy = ((slots - mean) * mask).square().sum(-1).double()
    place = torch.arange(slots.shape[3], device=slots.device)
    front = place < torch.ceil(share * sizes.double())[..., None]
    return torch.stack([(energy * front[:, None]).sum(), energy.sum()])


@dataclass
class EnergyRecorder:
    """Sums energies of every layer's keys while prompts pass the model."""

    facts: ModelFacts
    bases: Bases
    share: float
    sums: dict[int, Energies] = field(default_factory=dict)
    places: Places | None = None

    def record(
        self, module: nn.Module, query: Heads, key: Heads, value: Heads, scaling: float | None
    ) -> None:
        """K of one layer."""
        spans, layer = self.places.spans.to(key.device), module.layer_idx
        take = select(spans >= 0)
        if take.tokens:
            coefficients = into_coefficients(take.apply(key), self.bases.key[layer])
            found = energies(coefficients, blocks_of(spans), self.share)
            self.sums[layer] = self.sums.get(layer, 0.0) + found


def foreground_energy(
    model: Any,
    batches: Iterable[CalibrationBatch],
    bases: Bases,
    share: float,
    progress: Callable[[int], None] | None = None,
) -> dict[int, float]:
    """{layer: the foreground's share of K's energy}; 1 where all tokens of a span are alike.

    bases: of this model. share: of a span's tokens. progress: called with the batches done.
    """
    recorder = EnergyRecorder(model_facts(model), bases, share)
    # A group says how text is cut into spans; only visual spans have a foreground.
    read_prompts(model, batches, recorder, group=1, progress=progress)
    found = {layer: sums.tolist() for layer, sums in sorted(recorder.sums.items())}
    return {layer: front / every if every else 1.0 for layer, (front, every) in found.items()}
