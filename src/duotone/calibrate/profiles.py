"""Variances of coefficients in given bases, per layer and part of the tokens.

Each span's own variances decide which of its channels get many bits. So an allocation needs sorted
variances: the largest of every span, the next largest and so on, in the foreground and in the
background.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from duotone.cache.blocks import BlockTable
from duotone.cache.ragged import select
from duotone.cache.saliency import saliency_order
from duotone.hf.model.facts import ModelFacts
from duotone.hf.recording import recording
from duotone.inference.batch import generate, make_cache, prepare
from duotone.quant.bases import Bases

from .moments import CalibrationBatch, facts_of
from .places import Places, places_of
from .transform import Name

Heads = Float[Tensor, "batch heads tokens head_dim"]
PerHead = Float[Tensor, "kv_heads head_dim"]


def blocks_of(spans: Int[Tensor, "batch tokens"]) -> BlockTable:
    """The spans (numbers >= 0, consecutive tokens) of the tokens that belong to one."""
    rows = [row[row >= 0].unique_consecutive(return_counts=True)[1] for row in spans]
    sizes = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return BlockTable(torch.nn.functional.pad(sizes.cumsum(1), (1, 0)))


def sorted_squares(
    x: Float[Tensor, "batch kv_heads tokens head_dim"],
    blocks: BlockTable,
    shares: Mapping[str, float],
) -> dict[str, tuple[PerHead, int]]:
    """{part: (falling sums of squares about the spans' means; tokens)}; tokens by saliency.

    shares: of a span's tokens, part by part from the front.
    """
    slots, sizes = blocks.to_slots(x), blocks.sizes
    place = torch.arange(slots.shape[3], device=x.device)
    made, start = {}, torch.zeros_like(sizes)
    for number, (part, share) in enumerate(shares.items(), start=1):
        last = number == len(shares)
        stop = sizes if last else torch.minimum(start + (share * sizes).ceil().long(), sizes)
        mask = (place >= start[..., None]) & (place < stop[..., None])
        made[part] = _falling(slots, mask)
        start = stop
    return made


def _falling(slots: Tensor, mask: Tensor) -> tuple[PerHead, int]:
    """slots [batch, kv_heads, spans, longest, head_dim]; mask [batch, spans, longest]."""
    counts, chosen = mask.sum(-1)[:, None, :, None], mask[:, None, ..., None]
    mean = (slots * chosen).sum(3) / counts.clamp(min=1)
    squares = ((slots - mean[:, :, :, None]) * chosen).square().sum(3)
    return squares.sort(dim=-1, descending=True).values.sum((0, 2)), int(mask.sum())


def into_coefficients(x: Heads, basis: Float[Tensor, "kv_heads head_dim head_dim"]) -> Heads:
    """x E, in float32."""
    return x.float() @ basis.to(device=x.device, dtype=torch.float32)


@dataclass
class Profile:
    """Sums of sorted squares over all spans, in float64; and the number of tokens."""

    total: PerHead
    tokens: int

    def add(self, falling: PerHead, tokens: int) -> None:
        """Add one more batch."""
        self.total = self.total.to(falling.device) + falling
        self.tokens += tokens


@dataclass
class ProfileRecorder:
    """Sums sorted squares while prompts pass the model.

    shares: see `sorted_squares`. spans: sums by layer, tensor and part.
    """

    facts: ModelFacts
    bases: Bases
    shares: Mapping[str, float]
    spans: dict[Name, Profile] = field(default_factory=dict)
    places: Places | None = None

    def record(
        self, module: nn.Module, query: Heads, key: Heads, value: Heads, scaling: float | None
    ) -> None:
        """Add K and V of one layer."""
        if module.layer_idx not in self.facts.packed:
            return
        device, layer = key.device, self.facts.packed.index(module.layer_idx)
        take = select((self.places.spans >= 0).to(device))
        blocks = blocks_of(self.places.spans.to(device))
        if not take.tokens:
            return
        coefficients = {
            "key": into_coefficients(take.apply(key), self.bases.key[layer]),
            "value": into_coefficients(take.apply(value), self.bases.value[layer]),
        }
        order = saliency_order(coefficients["key"], blocks)[..., None]
        for which, x in coefficients.items():
            ordered = x.gather(2, order.expand_as(x))
            for part, (falling, tokens) in sorted_squares(ordered, blocks, self.shares).items():
                zero = Profile(torch.zeros_like(falling, dtype=torch.float64), 0)
                name = (layer, which, part)
                self.spans.setdefault(name, zero).add(falling.double(), tokens)

    def variances(self) -> dict[Name, PerHead]:
        """Variances of spans, sorted, mean over the tokens of all batches."""
        return {name: p.total / max(p.tokens, 1) for name, p in self.spans.items()}


@torch.inference_mode()
def gather_profiles(
    model: Any,
    batches: Sequence[CalibrationBatch],
    bases: Bases,
    shares: Mapping[str, float],
    group: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[Name, PerHead]:
    """Variances of spans in the batches' prompts, by layer, tensor and part.

    bases: of this model. shares: {part: share of a span's tokens}, from the front. group, progress:
    as for `gather_moments`.
    """
    recorder = ProfileRecorder(facts_of(model, batches), bases, shares)
    with recording(model, recorder.record):
        for number, given in enumerate(batches, start=1):
            batch = prepare(model, given.tensors)
            recorder.places = places_of(batch, group)
            # One token: the prompt is read, and no answer.
            generate(model, batch, make_cache(model, None, batch), 1)
            if progress:
                progress(number)
    return recorder.variances()
