"""Prefilled caches of a batch for throughput: 16 bit at its fastest, and any scheme frozen.

Contents are random: one sequence's K and V are quantized like a model's, and all sequences get
copies. Times do not depend on the values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from duotone.attention.dispatch import code_layouts
from duotone.attention.static import StaticDecoder
from duotone.bench.dense_attention import fastest_attention
from duotone.cache import LayerStore, Ledger, StaticPlaces, StaticStore
from duotone.cache.dense_dtype import channels_of, kept_as
from duotone.cache.places import flush_count
from duotone.cache.sharing import share_layers
from duotone.planning.shapes import DecoderShape, Load
from duotone.quant import CacheSpec


class BenchCache(Protocol):
    """A cache of a whole batch after its prompts, with room for all generated tokens."""

    attention: str
    has_stream: bool
    captures: bool  # whether a step may be a CUDA graph

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        ...

    def jump(self, generated: int) -> None:
        """Set lengths as if so many tokens had been generated."""
        ...

    def is_due(self, step: int) -> bool:
        """True if step `step` (tokens generated before it) starts with `flush`."""
        ...

    def flush(self) -> None:
        """Do the work between some steps."""
        ...

    def advance(self) -> None:
        """Make room for one token per sequence."""
        ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
    ) -> Tensor:
        """Store one token per sequence and attend."""
        ...

    def take_prompt(self, layer: int, key: Tensor, value: Tensor) -> None:
        """K and V of one sequence's prompt, as a prefill passes K and V on: row 0 of the batch."""
        ...


class Steady:
    """A cache in which nothing happens between steps."""

    has_stream, captures = False, True

    def is_due(self, step: int) -> bool:
        """False: no step starts with a flush."""
        return False

    def flush(self) -> None:
        """Do nothing: no token leaves."""

    def advance(self) -> None:
        """Do nothing: a length belongs to a captured graph, or to the cache itself."""


class NoCache(Steady):
    """Attention that returns the query, to time a step without attention."""

    attention, nbytes = "none", 0

    def jump(self, generated: int) -> None:
        """Keep nothing."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
    ) -> Tensor:
        """The query."""
        return query

    def take_prompt(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep nothing."""


class DenseCache(Steady):
    """16 bit, preallocated; attention reads existing tokens only.

    `jump` fixes the length that the next capture sees: one graph per length, as if a server kept a
    graph for each. This favours 16 bit: no mask, no unused slots, no device-side lengths.
    """

    def __init__(
        self, shape: DecoderShape, load: Load, batch: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.prompt, self.length = load.visual + load.prompt, load.visual + load.prompt + 1
        size = (2, batch, shape.kv_heads, load.tokens, shape.head_dim)
        self.states = [
            torch.empty(size, device=device, dtype=dtype).normal_() for _ in range(shape.layers)
        ]
        self.at = torch.full((1,), self.prompt, device=device)
        query = torch.randn(batch, shape.q_heads, 1, shape.head_dim, device=device, dtype=dtype)
        self._attend, self.attention = fastest_attention(query, *self._view(0))

    def _view(self, layer: int) -> tuple[Tensor, Tensor]:
        key, value = self.states[layer][:, :, :, : self.length]
        return key, value

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(states.nbytes for states in self.states)

    def jump(self, generated: int) -> None:
        """Let the next step write and read token `generated` after the prompt."""
        self.length = self.prompt + generated + 1
        self.at.fill_(self.length - 1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
    ) -> Tensor:
        """Write the newest token's slot, attend to everything up to it."""
        new = torch.stack((key, value))
        self.states[layer].index_copy_(3, self.at, new)
        return self._attend(query, *self._view(layer), sm_scale)

    def take_prompt(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Copy into row 0."""
        for row, states in zip(self.states[layer][:, 0], (key, value), strict=True):
            row[:, : self.prompt].copy_(states[0])


class PackedCache:
    """A scheme's stores, frozen after the prompt."""

    captures = True

    def __init__(
        self,
        shape: DecoderShape,
        spec: CacheSpec,
        load: Load,
        batch: int,
        device: torch.device,
        dtype: torch.dtype,
        impl: str = "auto",
    ) -> None:
        self.shape, self.spec, self.load = shape, spec, load
        self._layouts = code_layouts(spec, impl, device)
        stores, self._plan = self._prefilled(device, dtype)
        everyone = torch.zeros(batch, dtype=torch.long, device=device)
        state = self._plan.after.rows(everyone)
        places, order = StaticPlaces.of(state, spec, load.new)
        made = []
        for store in stores:
            store.rows(everyone)
            made.append(StaticStore(store, places, order))
            store.key = store.value = store.stream = None
        for store, static in zip(stores, made, strict=True):
            static.share({w: made[stores.index(s)] for w, s in store.sources.items()})
        self.decoder = StaticDecoder(made, spec.tau, impl)
        self.places, self.has_stream = places, self.decoder.has_stream
        self._start = (places.dense.clone(), places.stream.clone())
        for static in made:
            _fill(static)
        self.attention = impl

    def _prefilled(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[LayerStore], object]:
        """All layers with one sequence's prompt of random numbers."""
        shape, load, spec = self.shape, self.load, self.spec
        stores = [LayerStore(spec.at_layer(i), self._layouts) for i in range(shape.layers)]
        share_layers(stores, spec)
        tokens = load.visual + load.prompt
        visual = (torch.arange(tokens, device=device) < load.visual)[None]
        plan = Ledger(spec, 1, device).plan(visual, torch.ones_like(visual))
        size = (1, shape.kv_heads, tokens, shape.head_dim)
        for store in stores:
            states = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
            store.apply(plan, *states)
        return stores, plan

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.decoder.nbytes

    def jump(self, generated: int) -> None:
        """Set lengths as after so many tokens; the contents of the buffers are random."""
        places = self.places
        gone = places.group * flush_count(places.movable[0], generated, places.recent, places.group)
        places.dense.copy_(self._start[0] + generated - gone)
        places.stream.copy_(self._start[1] + gone)
        places.head.zero_()

    def is_due(self, step: int) -> bool:
        """True if some group leaves the window before this step."""
        return self.places.is_due(step)

    def flush(self) -> None:
        """Quantize a group of every sequence that is due."""
        self.decoder.flush()

    def advance(self) -> None:
        """Make room for one token per sequence."""
        self.decoder.advance()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
    ) -> Tensor:
        """Store one token per sequence and attend."""
        return self.decoder.attend(layer, query, key, value, sm_scale)

    def take_prompt(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Quantize and lay out one sequence's prompt; a server would write it to its row."""
        LayerStore(self.spec.at_layer(layer), self._layouts).apply(self._plan, key, value)


def _fill(store: StaticStore) -> None:
    """Fill the room for generated tokens with random numbers: zeros are read faster than data."""
    filled = int(store.places.dense.max())
    for states in (store.key, store.value):
        rest = states[:, :, filled:]
        size = (*rest.shape[1:-1], channels_of(rest))
        rest.copy_(kept_as(torch.randn(size, device=rest.device), rest.dtype))
    if store.stream is None:
        return
    if store.stream.records is not None:
        store.stream.records.fill_at_random(int(store.places.stream.max()))
        return
    for tensor in (store.stream.key, store.stream.value):
        for name in ("codes", "scale", "zero_point"):
            part = getattr(tensor, name)
            if part is None:
                continue
            tokens = part.shape[2] * int(store.places.stream.max()) // store.places.stream_tokens
            rest = part[:, :, tokens:]
            rest.random_(0, 256) if name == "codes" else rest.uniform_(0.1, 0.2)
