"""Ledger of tokens and their stores: one for all layers, or one per layer that evicts tokens.

Every forward step takes a plan from the ledger before the first layer runs (with eviction, once
scores are known). Each layer executes the plan on its own K and V; no layer decides anything. The
name of a token is its logical index: its position in the model's own timeline, padding included. A
layer can thus apply the model's masks.

    visual   packed spans, quantized once               (policy "visual")
    background   tokens of a span that stand out least, where the spec has a background
    stream   packed groups that left the window         (policy "text")
    dense    16 bit: sinks, the recent window, and everything whose policy is "dense"
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from duotone.cache.blocks import BlockTable, runs, single_block
from duotone.cache.index import Evicted, LedgerState, Roll
from duotone.cache.ragged import Lengths, Move, concatenate, owned, select, valid_mask
from duotone.cache.saliency import Spans
from duotone.quant import CacheSpec, KVSpec

# Most free slots after the dense tokens when they move, so that decoding rarely moves them; of a
# short conversation one per so many tokens.
SPARE_TOKENS = 16


@dataclass(frozen=True)
class Piece:
    """Tokens to pack: their source, their spans, and the move that joins them to the store.

    take: out of the step's tokens, or the stored ones; parts of spans out of `foreground_first`.
    decoding: True where they leave the window at a decode step.
    """

    take: Move
    spans: BlockTable
    join: Move
    decoding: bool = False


@dataclass(frozen=True)
class Flush:
    """Whole groups that leave the dense store for the stream; keep: the dense tokens that stay."""

    piece: Piece
    keep: Move


@dataclass(frozen=True)
class AppendPlan:
    """Changes of one forward step to each layer, in this order.

    flush_first: groups that leave the window before a decode step's token enters it. They were in
        16 bit before the step, so all layers may flush them before the first one runs.
    visual: tokens of this step that are packed as visual spans. background: visual tokens that are
        packed as background. spans: tokens of both, which a layer takes and orders first; None
        without a background.
    dense: tokens of this step that stay in 16 bit, or None. They are written in place at `write_at`
        or, where the store must grow, joined by `dense_join`.
    flush_last: groups that leave the window after a prompt, or a later turn's, entered it.
    begun: where keys are normalised (`cache.key_norm`), True at sequences whose first tokens this
        step brings; None if there are none.
    """

    before: LedgerState
    after: LedgerState
    tokens: int
    flush_first: Flush | None
    visual: Piece | None
    dense: Move | None
    write_at: Lengths | None
    dense_join: Move | None
    flush_last: Flush | None
    background: Piece | None = None
    spans: Spans | None = None
    begun: Bool[Tensor, " batch"] | None = None

    @property
    def is_decode_step(self) -> bool:
        """True for one token per sequence in 16 bit: attention reads it from the store."""
        return self.tokens == 1 and self.visual is None


class Ledger:
    """Turn the masks of a step into a plan, by the policy of a `CacheSpec`."""

    def __init__(self, spec: CacheSpec, batch: int, device: torch.device) -> None:
        self.spec = spec
        roll = Roll(
            torch.zeros(batch, 0, dtype=torch.int32, device=device),
            torch.zeros(batch, dtype=torch.long, device=device),
        )
        streamed = torch.zeros(batch, 0, dtype=torch.bool, device=device)
        evicted = Evicted(roll.lengths, roll.lengths)
        self.state = LedgerState(roll, roll, roll, roll, streamed, evicted, 0)
        self._all_begun = not spec.key_norm

    def plan(
        self,
        visual: Bool[Tensor, "batch tokens"],
        real: Bool[Tensor, "batch tokens"],
        kept: Bool[Tensor, "batch tokens"] | None = None,
    ) -> AppendPlan:
        """Plan a step of new tokens and record it as done.

        visual: tokens of images and videos. real: False at padding, which is stored nowhere.
        kept: False at evicted tokens, which are counted but stored nowhere; None: all stay.
        """
        before, tokens, shown = self.state, visual.shape[1], visual & real
        begun = self._begun(real)
        if kept is not None:
            self._evict(visual, real & ~kept)
            real = real & kept
        packed = visual & real if isinstance(self.spec.visual, KVSpec) else torch.zeros_like(real)
        any_packed = bool(packed.any())
        decodes = tokens == 1 and not any_packed
        flush_first = self._flush(decoding=True) if decodes else None
        spans = piece = background = None
        # Waiting for the device costs time at every decode step: one wait is enough.
        if any_packed:
            spans, piece, background = self._pack_visual(packed, shown)
        dense = write_at = join = None
        staying = real & ~packed
        if staying.any():
            dense = select(staying)
            write_at, join = self._append_dense(dense, visual)
        flush_last = None if decodes else self._flush(decoding=False)
        self.state = replace(self.state, seen=before.seen + tokens)
        stored = (piece, dense, write_at, join, flush_last, background, spans, begun)
        return AppendPlan(before, self.state, tokens, flush_first, *stored)

    def decoded(self, steps: int, rows: Int[Tensor, " batch"] | None = None) -> None:
        """Record `steps` decode steps of one 16-bit token per sequence, without their plans.

        The state becomes what as many calls of `plan` would make of it. rows: the sequences that
        these have become, in stores as wide as before.
        """
        if rows is not None:
            self.state = self.state.reordered(rows)
        if not steps:
            return
        s, batch = self.state, len(self.state.dense.lengths)
        every = torch.ones(batch, steps, dtype=torch.bool, device=s.streamed.device)
        self._append_dense(select(every), ~every)
        if isinstance(self.spec.text, KVSpec):
            # A group that is complete with the last token leaves at the step after it.
            leaving = self._leaving(self.state.movable(self.spec.sink), entered=1)
            if leaving.any():
                self._move_to_stream(leaving, decoding=True)
        dense = self.state.dense.trimmed()
        streamed = owned(self.state.streamed[:, : dense.positions.shape[1]])
        seen = s.seen + steps
        self.state = replace(self.state, dense=dense, streamed=streamed, seen=seen)

    def crop(self, end: int) -> None:
        """Forget tokens at logical indices >= end."""
        self.state = self.state.truncate(end)
        # Some sequences may have only padding left.
        self._all_begun = not self.spec.key_norm

    def rows(self, index: Tensor) -> None:
        """Pick sequences (beam search, batch select and repeat)."""
        self.state = self.state.rows(index)

    def _begun(self, real: Tensor) -> Tensor | None:
        """True at sequences that have no token yet and get some; None if there are none."""
        if self._all_begun:
            return None
        held = self.state.tokens > 0
        begun = ~held & real.any(-1)
        # This waits for the device at every step of a batch with sequences that have not begun.
        self._all_begun, some = torch.stack([(held | begun).all(), begun.any()]).tolist()
        return begun if some else None

    def _evict(self, visual: Tensor, gone: Tensor) -> None:
        if not gone.any():
            return
        packed = gone & visual if isinstance(self.spec.visual, KVSpec) else torch.zeros_like(gone)
        old, end = self.state.evicted, self.state.seen + gone.shape[1]
        evicted = Evicted(old.tokens + gone.sum(-1), old.visual + packed.sum(-1), end)
        self.state = replace(self.state, evicted=evicted)

    def _pack_visual(
        self, packed: Tensor, shown: Tensor
    ) -> tuple[Spans | None, Piece, Piece | None]:
        """(spans, their pieces): one of all tokens, or foreground and background of spans."""
        if self.spec.background is None:
            return None, self._pack("visual", packed, shown), None
        take = select(packed)
        blocks = self._spans(packed, take.lengths, shown)
        block = blocks.block_of_token(take.tokens)
        place = torch.arange(take.tokens, device=packed.device) - blocks.offsets.gather(1, block)
        in_front = place < self._in_front(blocks.sizes).gather(1, block)
        in_front &= valid_mask(take.lengths, take.tokens)
        wholes = _extents(shown, self.state.seen, by_run=self.spec.ranges == "run")
        self.state = replace(self.state, wholes=self.state.wholes + wholes)
        front = torch.zeros_like(packed).scatter(1, take.index, in_front)
        piece = self._pack("visual", front, shown)
        background = self._pack("background", packed & ~front, shown)
        parts = [part.take for part in (piece, background) if part is not None]
        spans = Spans.of(packed, take, blocks, parts)
        return spans, _part_from(0, piece), _part_from(parts[0].tokens, background)

    def _in_front(self, sizes: Tensor) -> Tensor:
        """Tokens of the foreground, as `CacheSpec.foreground_of`."""
        share = torch.full_like(sizes, self.spec.foreground, dtype=torch.float64)
        # The first pair that fits is filled in last.
        for fewer, short in reversed(self.spec.short_steps):
            share = share.masked_fill(sizes < fewer, short)
        front, multiple = share * sizes, self.spec.foreground_multiple
        if multiple == 1:
            return torch.ceil(front).long()
        most = (sizes - 1) // multiple
        parts = torch.floor(front / multiple + 0.5).long().clamp_min(1).minimum(most)
        is_exact = (sizes < 2 * multiple) | (share == 1)
        return torch.where(is_exact, torch.ceil(front).long(), multiple * parts)

    def _spans(self, tokens: Tensor, lengths: Lengths, shown: Tensor) -> BlockTable:
        return runs(tokens, lengths, shown) if self.spec.ranges == "run" else single_block(lengths)

    def _pack(self, name: str, packed: Tensor, shown: Tensor) -> Piece | None:
        """Plan one store's tokens. packed: tokens to pack; shown: also those that were evicted."""
        if not packed.any():
            return None
        take = select(packed)
        roll: Roll = getattr(self.state, name)
        join = concatenate(roll.lengths, take.lengths, roll.positions.shape[1])
        positions = self._positions(take)
        self.state = replace(self.state, **{name: _joined(roll, positions, join)})
        return Piece(take, self._spans(packed, take.lengths, shown), join)

    def _append_dense(self, take: Move, visual: Tensor) -> tuple[Lengths | None, Move | None]:
        """Enter new tokens into the dense roll; returns (write_at, None) or (None, join)."""
        s, roll = self.state, self.state.dense
        positions, streamed = self._positions(take), self._streamed(take, visual)
        capacity, width = roll.positions.shape[1], take.tokens
        fits = width == 1 and int(roll.lengths.max()) < capacity and bool((take.lengths == 1).all())
        if fits:
            at = roll.lengths[:, None]
            new = Roll(roll.positions.scatter(1, at, positions), roll.lengths + 1)
            self.state = replace(s, dense=new, streamed=s.streamed.scatter(1, at, streamed))
            return roll.lengths, None
        spare = min(SPARE_TOKENS, s.seen // SPARE_TOKENS) if width == 1 else 0
        join = concatenate(roll.lengths, take.lengths, capacity, spare)
        flags = join.apply_flat(torch.cat([s.streamed, streamed], 1))
        self.state = replace(s, dense=_joined(roll, positions, join), streamed=flags)
        return None, join

    def _positions(self, take: Move) -> Tensor:
        return (take.index + self.state.seen).int()

    def _streamed(self, take: Move, visual: Tensor) -> Tensor:
        """Flags of the taken tokens that belong to the text stream."""
        if not isinstance(self.spec.text, KVSpec):
            return torch.zeros_like(take.index, dtype=torch.bool)
        valid = valid_mask(take.lengths, take.tokens)
        return valid if self.spec.visual == "text" else valid & ~visual.gather(1, take.index)

    def _flush(self, decoding: bool) -> Flush | None:
        """Whole groups beyond the recent window, oldest first; None if there are none."""
        if not isinstance(self.spec.text, KVSpec):
            return None
        leaving = self._leaving(self.state.movable(self.spec.sink))
        return self._move_to_stream(leaving, decoding) if leaving.any() else None

    def _leaving(self, movable: Tensor, entered: int = 0) -> Tensor:
        """True at whole groups beyond the window, before the last `entered` tokens came."""
        group = self.spec.flush_tokens
        groups = (movable.sum(-1) - entered - self.spec.recent).clamp_min(0) // group
        return movable & (movable.cumsum(-1) <= (groups * group)[:, None])

    def _move_to_stream(self, leaving: Tensor, decoding: bool) -> Flush:
        s = self.state
        take = select(leaving)
        keep = select(~leaving & valid_mask(s.dense.lengths, leaving.shape[1]))
        join = concatenate(s.stream.lengths, take.lengths, s.stream.positions.shape[1])
        stream = _joined(s.stream, take.apply_flat(s.dense.positions), join)
        dense = Roll(keep.apply_flat(s.dense.positions), keep.lengths)
        streamed = keep.apply_flat(s.streamed)
        self.state = replace(s, stream=stream, dense=dense, streamed=streamed)
        return Flush(Piece(take, single_block(take.lengths), join, decoding), keep)


def _part_from(start: int, piece: Piece | None) -> Piece | None:
    """Piece of a part of spans, whose first token is number `start` of `foreground_first`."""
    if piece is None:
        return None
    return replace(piece, take=Move.consecutive(start, piece.take.tokens, piece.take.lengths))


def _joined(roll: Roll, positions: Tensor, join: Move) -> Roll:
    return Roll(join.apply_flat(torch.cat([roll.positions, positions], 1)), join.lengths)


def _extents(
    shown: Bool[Tensor, "batch tokens"], seen: int, by_run: bool
) -> tuple[tuple[int, int], ...]:
    """Logical ends of spans, those that overlap in several sequences as one.

    shown: visual tokens, evicted ones too, as runs have them. seen: tokens before the step. by_run:
    each run is a span; else all are one.
    """
    place, found = seen, []
    for is_shown, run in groupby(shown.any(0).tolist()):
        tokens = len(list(run))
        found += [(place, place + tokens)] * is_shown
        place += tokens
    return tuple(found) if by_run else ((found[0][0], found[-1][1]),)
