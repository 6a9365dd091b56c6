"""What bases leave to code: variances of coefficients, per layer and part of the tokens.

Which channels get many bits is decided per span, by the span's own variances; so what an allocation
needs is not the variance of each channel but that of the largest, the next one and so on of every
span, in the foreground and in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from duotone.cache.blocks import BlockTable
from duotone.cache.prominence import prominence_order
from duotone.cache.ragged import select
from duotone.hf.facts import ModelFacts, model_facts
from duotone.inference import generate, make_cache, prepare
from duotone.quant.bases import Bases

from .moments import CalibrationBatch, Places, places_of, recording
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
    """{part: (falling sums of squares about the spans' means; tokens)}; tokens by prominence.

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


@dataclass
class Profile:
    """Sorted squares of all spans, summed, in float64; and their tokens."""

    total: PerHead
    tokens: int

    def add(self, falling: PerHead, tokens: int) -> None:
        """One more batch."""
        self.total = self.total.to(falling.device) + falling
        self.tokens += tokens


@dataclass
class ProfileRecorder:
    """Sums sorted squares while prompts pass the model. shares: see `sorted_squares`."""

    facts: ModelFacts
    bases: Bases
    shares: Mapping[str, float]
    profiles: dict[Name, Profile] = field(default_factory=dict)
    places: Places | None = None

    def record(
        self, module: nn.Module, query: Heads, key: Heads, value: Heads, scaling: float | None
    ) -> None:
        """K and V of one layer."""
        device, layer = key.device, module.layer_idx
        take = select((self.places.spans >= 0).to(device))
        blocks = blocks_of(self.places.spans.to(device))
        if not take.tokens:
            return
        coefficients = {
            "key": self._coefficients(take.apply(key), "key", layer),
            "value": self._coefficients(take.apply(value), "value", layer),
        }
        order = prominence_order(coefficients["key"], blocks)[..., None]
        for which, x in coefficients.items():
            self._add(layer, which, x.gather(2, order.expand_as(x)), blocks)

    def _coefficients(self, x: Heads, which: Literal["key", "value"], layer: int) -> Heads:
        basis = getattr(self.bases, which)[layer]
        return x.float() @ basis.to(device=x.device, dtype=torch.float32)

    def _add(self, layer: int, which: str, x: Tensor, blocks: BlockTable) -> None:
        for part, (falling, tokens) in sorted_squares(x, blocks, self.shares).items():
            zero = Profile(torch.zeros_like(falling, dtype=torch.float64), 0)
            self.profiles.setdefault((layer, which, part), zero).add(falling.double(), tokens)


@torch.inference_mode()
def gather_profiles(
    model: Any,
    batches: Iterable[CalibrationBatch],
    bases: Bases,
    shares: Mapping[str, float],
    group: int = 128,
    progress: Callable[[int], None] | None = None,
    profiles: dict[Name, Profile] | None = None,
    done: int = 0,
) -> dict[Name, PerHead]:
    """{(layer, which, part): spans' variances, sorted, mean over tokens} of the batches' prompts.

    bases: of this model. shares: {part: share of a span's tokens}, from the front. group: tokens
    per span of a text model. progress: called with the batches done. profiles: what the first
    `done` batches gave; the others are added to it.
    """
    profiles = {} if profiles is None else profiles
    recorder = ProfileRecorder(model_facts(model), bases, shares, profiles)
    with recording(model, recorder):
        for number, given in enumerate(islice(batches, done, None), start=done + 1):
            batch = prepare(model, given.tensors)
            recorder.places = places_of(batch, recorder.facts, group)
            # One token: the prompt is read, nothing more.
            generate(model, batch, make_cache(model, None, batch), 1)
            if progress:
                progress(number)
    return {name: p.total / max(p.tokens, 1) for name, p in profiles.items()}
