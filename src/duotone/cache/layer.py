"""One layer's tensors: packed visual stores, a packed stream, and a dense store."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.cache.declared import own_tensors
from duotone.cache.index import STORES, LedgerState, Roll
from duotone.cache.key_norm import Norm, divided, key_norm, taken_over
from duotone.cache.lag import Lagging
from duotone.cache.ledger import AppendPlan, Flush, Piece
from duotone.cache.packed import Codes, PackedTensor
from duotone.cache.pair import Layout, Layouts, PackedPair
from duotone.cache.ragged import Move, owned
from duotone.cache.runs import RunMember
from duotone.cache.saliency import foreground_first
from duotone.cache.segments import DenseSegment, PackedSegment, Segment
from duotone.cache.visibility import Visibility
from duotone.quant import CacheSpec, KVSpec
from duotone.quant.autocast import without_autocast

# The last axis are channels, of K and V as many but in latent caches.
States = Float[Tensor, "batch kv_heads tokens _"]


class LayerStore:
    """Execute the ledger's plans on one layer's K and V.

    spec: policies of this layer. sources: stores whose codes this one reads instead of keeping its
    own, by "key" and "value" (`cache.sharing`). lends: names of both whose codes other layers read.
    runs: this layer's part in a run that averages its codes, by the same names.
    layouts: layouts of decode kernels for the packed stores; runs that average codes keep the
    canonical order. canonical: names of packed stores that keep the canonical order, too; layers
    whose runs meet have one such set. dtype: first type of K and V, once a token is stored; key and
    value hold the dense tokens in the spec's type.
    """

    def __init__(self, spec: CacheSpec, layouts: Layouts | None = None) -> None:
        self.spec, self.layouts = spec, layouts or Layouts()
        self.sources: dict[str, LayerStore] = {}
        self.lends: set[str] = set()
        self.runs: dict[str, RunMember] = {}
        self.canonical: set[str] = set()
        self.key_norm: Norm | None = None
        self.lag_values: Tensor | None = None
        self.lag_lengths: Tensor | None = None
        self._flushed: Flush | None = None
        self._completed: dict[str, tuple[list[PackedPair], PackedPair]] = {}
        self.visual: PackedPair | None = None
        self.background: PackedPair | None = None
        self.stream: PackedPair | None = None
        self.dtype: torch.dtype | None = None
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def apply(self, plan: AppendPlan, key: States, value: States) -> None:
        """Take in this step's post-RoPE K and V, [batch, kv_heads, plan.tokens, head_dim].

        States may come in another type than the first ones, as under `torch.autocast`. Stores keep
        the wider of the first types of K and V; later states are converted to it.
        """
        self._ensure_dense(key, value)
        with without_autocast(key.device):
            self._apply(plan, key.to(self.dtype), value.to(self.dtype))

    def _apply(self, plan: AppendPlan, key: States, value: States) -> None:
        if plan.flush_first is not None:
            self.flush(plan.flush_first)
        shown = key, value
        if plan.spans is not None:
            shown = foreground_first(*shown, plan.spans, self.spec.visual.key.transform)
        for name in ("visual", "background"):
            piece = getattr(plan, name)
            if piece is not None:
                self._pack(name, *shown, getattr(self.spec, name), piece)
                self.lay_out(name)
        staying = key[:, :, :0] if plan.dense is None else plan.dense.apply(key)
        if plan.begun is not None:
            self._take_norm(plan, staying)
        if plan.dense is not None:
            self._append_dense(plan, staying, plan.dense.apply(value))
        if plan.flush_last is not None:
            self.flush(plan.flush_last)
        self._flushed = None

    def segments(self, state: LedgerState, seen: Visibility | None = None) -> list[Segment]:
        """Segments that attention reads. seen: by the queries; None: all tokens by all.

        Errors: ValueError where a query sees a part of visual tokens that have a background.
        """
        placed = self.placed_segments(state)
        if seen is None:
            return [segment for segment, _ in placed]
        if self.background is not None:
            seen.check_whole(state.visual, state.background)
        return [replace(segment, mask=seen.of(roll)) for segment, roll in placed]

    def placed_segments(self, state: LedgerState) -> list[tuple[Segment, Roll]]:
        """Segments of the stored tokens, with their positions in the model's timeline."""
        placed: list[tuple[Segment, Roll]] = []
        for name in STORES:
            pair, roll, visual = self._complete(name), getattr(state, name), name != "stream"
            if pair is not None and pair.key.tokens:
                norm = None if visual else self.key_norm
                exact = None if visual else self._read_exactly(state)
                segment = PackedSegment(
                    pair.key,
                    pair.value,
                    roll.lengths,
                    visual,
                    key_norm=norm,
                    records=pair.records,
                    exact=exact,
                )
                placed.append((segment, roll))
        if self.key is not None and self.key.shape[2]:
            dense = DenseSegment(self.key, self.value, state.dense.lengths)
            placed.append((dense, state.dense))
        return placed

    def truncate(self, state: LedgerState, before: LedgerState) -> None:
        """Drop the tokens that a cropped ledger has dropped. before: its state until then.

        Stores that lose no token keep a kernel's order.
        """
        self._completed.clear()
        if (lag := self.lag) is not None:
            lengths = self.stream.value.blocks.lengths
            self._keep_lag(lag.cut(lengths, state.stream.lengths))
        for name in STORES:
            pair = getattr(self, name)
            if pair is not None and getattr(state, name) is not getattr(before, name):
                setattr(self, name, pair.truncate(getattr(state, name).lengths))
                self.lay_out(name)
        if self.key is not None:
            width = state.dense.positions.shape[1]
            self.key, self.value = (owned(x[:, :, :width]) for x in (self.key, self.value))

    def rows(self, index: Tensor) -> None:
        """Pick sequences."""
        self._completed.clear()
        for name in STORES:
            pair = getattr(self, name)
            setattr(self, name, None if pair is None else pair.rows(index))
        if self.key is not None:
            self.key, self.value = self.key[index], self.value[index]
        if self.key_norm is not None:
            self.key_norm = self.key_norm[index]
        if (lag := self.lag) is not None:
            self._keep_lag(lag.rows(index))

    def _pack(self, name: str, key: States, value: States, spec: KVSpec, piece: Piece) -> None:
        """Quantize tokens and join them to a store; codes go to the layer that keeps them."""
        self._completed.clear()
        new, old = self._packed(name, key, value, spec, piece), getattr(self, name)
        own = new.without_codes(self.sources)
        layout = self.layout_of(name)
        if name == "stream" and layout is not None:
            own = own.laid_out(layout)
        setattr(self, name, own if old is None else old.append(own, piece.join))
        for which, member in self.runs.items():
            codes = member.add(name, getattr(new, which))
            if codes is not None:
                keeper = self.sources.get(which, self)
                before = None if old is None else getattr(old, which).tokens
                keeper._put_codes(name, which, codes, before, piece.join)

    def _packed(
        self, name: str, key: States, value: States, spec: KVSpec, piece: Piece
    ) -> PackedPair:
        """Quantize tokens, straight into a kernel's order where possible."""
        layout = self.layout_of(name)
        pair = None if layout is None else layout.pack(key, value, spec, piece)
        return PackedPair.pack(key, value, spec, piece) if pair is None else pair

    def layout_of(self, name: str) -> Layout | None:
        """Layout of one of `STORES`; None: canonical order."""
        if self.runs or name in self.canonical:
            return None
        if not self.shares:
            return getattr(self.layouts, name)
        stream = self.layouts.stream if name == "stream" else None
        return None if stream is None else stream.sharing(self.lends, self.sources)

    def lay_out(self, name: str) -> None:
        """Bring one of `STORES` into a kernel's order, where it has one."""
        layout = self.layout_of(name)
        if layout is not None:
            setattr(self, name, getattr(self, name).laid_out(layout))
        # Layers that share codes have one order: if one lacks a kernel's order, so do all.
        if self.shares and getattr(self, name).records is None:
            self.canonical.add(name)

    def _settled(self, name: str) -> PackedPair | None:
        """Pair of a store, put into canonical order if the kernel's order was given up."""
        pair = getattr(self, name)
        if name in self.canonical and pair is not None:
            pair = pair.canonical()
            setattr(self, name, pair)
        return pair

    def _put_codes(
        self, name: str, which: str, codes: Codes, before: int | None, join: Move
    ) -> None:
        """Replace the codes of the tokens that joined last, after the first `before`."""
        pair = getattr(self, name)
        tensor: PackedTensor = getattr(pair, which)
        if before is not None:
            codes = join.apply(torch.cat([tensor.codes[:, :, :before], codes], 2))
        setattr(self, name, replace(pair, **{which: replace(tensor, codes=codes)}))

    def _complete(self, name: str) -> PackedPair | None:
        """Pair of a store with the codes that other layers keep for it."""
        pair = self._settled(name)
        if pair is None or not self.sources:
            return pair
        parts = [pair, *(source._settled(name) for source in self.sources.values())]
        known, completed = self._completed.get(name, ((), pair))
        if len(known) != len(parts) or any(x is not y for x, y in zip(known, parts, strict=True)):
            completed = pair
            for which, source in zip(self.sources, parts[1:], strict=True):
                completed = completed.with_codes(which, source)
            # Attention keeps its launches where it meets one object again. A pair that is replaced
            # must not outlive its store: `_pack`, `truncate` and `rows` forget this one.
            self._completed[name] = parts, completed
        return completed

    @property
    def shares(self) -> bool:
        """True where this layer and another one read the same codes."""
        return bool(self.sources or self.lends)

    def own_tensors(self) -> dict[str, Tensor]:
        """{name: tensor} of all tensors outside packed stores (`cache.declared`)."""
        heads = tuple(self.key.shape[:2])
        head_dims = (self.key.shape[3], self.value.shape[3])
        names = own_tensors(self.spec, self.dtype, heads, head_dims, self.key.shape[2])
        held = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    @property
    def lag(self) -> Lagging | None:
        """Exact V of the newest packed tokens, if the spec keeps it and there are some."""
        if self.lag_values is None:
            return None
        return Lagging(self.lag_values, self.lag_lengths)

    def _keep_lag(self, lag: Lagging) -> None:
        self.lag_values, self.lag_lengths = owned(lag.values), lag.lengths

    def _read_exactly(self, state: LedgerState) -> Lagging | None:
        """Exact V that attention reads: the spec's newest tokens, less those of the window."""
        lag = self.lag
        if lag is None:
            return None
        return lag.newest(self.spec.text.value.lag - state.movable(self.spec.sink).sum(-1))

    @property
    def lag_bytes(self) -> int:
        """Bytes of exact V of packed tokens."""
        return 0 if self.lag_values is None else self.lag_values.nbytes

    @property
    def norm_bytes(self) -> int:
        """Bytes of the key normalisation."""
        return 0 if self.key_norm is None else self.key_norm.nbytes

    def _ensure_dense(self, key: States, value: States) -> None:
        if self.key is None:
            self.dtype = torch.promote_types(key.dtype, value.dtype)
            self.key, self.value = (owned(x[:, :, :0]).to(self.dtype) for x in (key, value))

    def _append_dense(self, plan: AppendPlan, key: States, value: States) -> None:
        key, value = key.to(self.dtype), value.to(self.dtype)
        if plan.write_at is not None:
            row = torch.arange(key.shape[0], device=key.device)
            self.key[row, :, plan.write_at] = key[:, :, 0]
            self.value[row, :, plan.write_at] = value[:, :, 0]
            return
        if self.key.shape[2]:
            key, value = torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)
        self.key, self.value = plan.dense_join.apply(key), plan.dense_join.apply(value)

    def _take_norm(self, plan: AppendPlan, key: States) -> None:
        """Fix the norm of the sequences that begin, over the dense tokens of this step.

        Packed visual spans and evicted tokens do not enter it.
        """
        lengths = plan.begun.long() if plan.dense is None else plan.dense.lengths
        new = key_norm(key, lengths, self.spec.text.key.param_dtype)
        self.key_norm = taken_over(self.key_norm, new, plan.begun)

    def flush(self, flush: Flush) -> None:
        """Move groups from the window to the stream, once."""
        if flush is self._flushed:
            return
        self._flushed = flush
        with without_autocast(self.key.device):
            self._flush(flush)

    def _flush(self, flush: Flush) -> None:
        key = divided(self.key, self.key_norm)
        self._pack("stream", key, self.value, self.spec.text, flush.piece)
        if most := self.spec.text.value.lag:
            take = flush.piece.take
            new = take.apply(self.value)
            self._keep_lag(Lagging.joined(self.lag, new, take.lengths, most))
        self.lay_out("stream")
        self.key, self.value = flush.keep.apply(self.key), flush.keep.apply(self.value)
