"""Pages of a served cache: packed tiles by block table, and rings for tokens of unfinished ones.

The plain-torch reference of all that an engine asks of a layer. A page holds some tokens of one
request in group records with their scales, so that requests share pages one by one. Tokens are
packed when the last one of a page comes. Until then they are in 16 bit in ring pages of the
request, at slot position % ring tokens.

Shapes: T new tokens of one request, H kv heads, D channels, P pages of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from duotone.attention.cuda.groups.format import GroupFormat, format_of
from duotone.attention.cuda.groups.layout import to_group_records
from duotone.attention.cuda.groups.pack import group_pack
from duotone.attention.cuda.groups.records import GroupRecords
from duotone.attention.cuda.shared.runtime import has_kernels
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.packing import pack_groups
from duotone.quant import KVSpec, TensorSpec

# Drafts of an engine that a ring has slots for, next to the tokens of a page.
DRAFTS = 4
# Bits of each served width, with the end points that lose least (docs/schemes.md).
ETAS = {2: 0.045, 4: 0.0}


def served_spec(bits: int) -> KVSpec:
    """Groups of 32 for K along tokens and V along channels: `duotone-stream` without its windows.

    Errors: ValueError for bits that are not served.
    """
    if bits not in ETAS:
        raise ValueError(f"a served cache has {[*ETAS]} bits; got {bits}")
    both = (TensorSpec(bits, along=x, group=32, eta=ETAS[bits]) for x in ("tokens", "channels"))
    return KVSpec(*both)


@dataclass(frozen=True)
class PageLayout:
    """Sizes of the pages of one layer.

    dtype: of K and V. Errors: `RefusedError` for a head_dim that no kernel reads.
    """

    bits: int
    head_dim: int
    dtype: torch.dtype

    @cached_property
    def spec(self) -> KVSpec:
        """Spec of K and V."""
        return served_spec(self.bits)

    @cached_property
    def form(self) -> GroupFormat:
        """Contents of a page of one head."""
        return format_of(self.spec.key, self.spec.value, (self.head_dim, self.head_dim))

    @property
    def tokens(self) -> int:
        """Tokens of a page."""
        return self.form.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of a page of one head."""
        return self.form.own_nbytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token of one head in a page."""
        return self.nbytes // self.tokens

    @property
    def ring_rows(self) -> int:
        """16-bit tokens that a page holds as a part of a ring."""
        return self.nbytes // (2 * self.head_dim * self.dtype.itemsize)

    @property
    def rings(self) -> int:
        """Pages that a request's ring takes."""
        return -(-(self.tokens + DRAFTS) // self.ring_rows)

    @property
    def ring_tokens(self) -> int:
        """Slots of a ring."""
        return self.rings * self.ring_rows

    def records(self, pool: Tensor) -> Tensor:
        """Pages as records. pool: [P, H, tokens, token_bytes] uint8 -> [P, H, nbytes]."""
        return pool.view(*pool.shape[:2], self.nbytes)

    def rows(self, pool: Tensor) -> Tensor:
        """The pool as 16-bit tokens. pool as in `records` -> [P * H * 2 * ring_rows, D]."""
        return self.records(pool).view(self.dtype).view(-1, self.head_dim)

    def ring_slots(self, blocks: Tensor, positions: Tensor, kv_heads: int) -> Tensor:
        """Rows of `rows` that tokens have in a ring: K's, then V's.

        blocks: [.., rings], pages of a request. positions: [.., n]. Returns [2, .., kv_heads, n].
        """
        slots = positions % self.ring_tokens
        block = blocks.long().gather(-1, slots // self.ring_rows)[..., None, :]
        heads = torch.arange(kv_heads, device=blocks.device)[:, None]
        key = (block * kv_heads + heads) * (2 * self.ring_rows)
        key = key + (slots % self.ring_rows)[..., None, :]
        return torch.stack([key, key + self.ring_rows])


def read_pages(layout: PageLayout, pool: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of whole pages, [pages * tokens, H, D] each, in `layout.dtype`.

    pool: [P, H, tokens, token_bytes] uint8. pages: [pages], numbers in the pool, in order.
    """
    if not len(pages):
        nothing = pool.new_zeros(0, pool.shape[1], layout.head_dim, dtype=layout.dtype)
        return nothing, nothing
    data = layout.records(pool)[pages.long()].transpose(0, 1)[None].contiguous()
    bare = [_bare(layout, spec, len(pages), pool.device) for spec in _both(layout.spec)]
    both = GroupRecords(layout.form, data).canonical(*bare)
    return tuple(x.dequantize()[0].transpose(0, 1) for x in both)


def write_pages(
    layout: PageLayout, pool: Tensor, pages: Tensor, key: Tensor, value: Tensor
) -> None:
    """Quantize whole pages of tokens into the pool.

    key, value: [pages * tokens, H, D] in `layout.dtype`.
    """
    if has_kernels(pool.device):
        new = _packed_by_kernel(layout, len(pages), key, value)
        layout.records(pool)[pages.long()] = new.transpose(0, 1)
        return
    packed = []
    for x, spec in zip((key, value), _both(layout.spec), strict=True):
        heads_first = x.transpose(0, 1)[None]
        table = _bare(layout, spec, len(pages), x.device).blocks
        parts = pack_groups(heads_first, spec)
        packed.append(PackedTensor(spec, layout.head_dim, layout.dtype, table, **parts))
    records = to_group_records(*packed, layout.form)[0]
    layout.records(pool)[pages.long()] = records.transpose(0, 1)


def _packed_by_kernel(layout: PageLayout, pages: int, key: Tensor, value: Tensor) -> Tensor:
    """Pages of K and V, [H, pages, nbytes]."""
    heads, device = key.shape[1], key.device
    data = torch.zeros(1, heads, pages, layout.nbytes, dtype=torch.uint8, device=device)
    index = torch.arange(pages * layout.tokens, device=device)[None]
    tiles = torch.full((1,), pages * layout.form.tiles, device=device)
    states = (x.transpose(0, 1)[None] for x in (key, value))
    group_pack(*states, index, tiles, torch.zeros_like(tiles), layout.form, layout.spec, data)
    return data[0]


def read_ring(
    layout: PageLayout, pool: Tensor, blocks: Tensor, first: int, end: int
) -> tuple[Tensor, Tensor]:
    """K and V of the tokens from `first` to `end`, [end - first, H, D] each, copied.

    blocks: [rings], the request's pages.
    """
    slots = layout.ring_slots(blocks, torch.arange(first, end, device=pool.device), pool.shape[1])
    return tuple(x.transpose(0, 1) for x in layout.rows(pool)[slots])


def write_ring(
    layout: PageLayout, pool: Tensor, blocks: Tensor, first: int, key: Tensor, value: Tensor
) -> None:
    """Put tokens from position `first` on into a ring. key, value: [n, H, D], n <= ring_tokens."""
    positions = torch.arange(first, first + len(key), device=pool.device)
    slots = layout.ring_slots(blocks, positions, pool.shape[1])
    layout.rows(pool)[slots] = torch.stack([key, value]).transpose(1, 2)


def append_tokens(
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    rings: Tensor,
    full: Tensor,
    position: Tensor,
    layout: PageLayout,
) -> None:
    """Write a token of each request into its ring; pack the page that becomes full by it.

    key, value: [n, H, D]. rings: [n, rings], pages. full: [n], the page; 0, that of nobody, packs
    nothing. position: [n], of the token; below 0: it is not kept.
    """
    for n, (page, at) in enumerate(zip(full.tolist(), position.tolist(), strict=True)):
        if at < 0:
            continue
        write_ring(layout, pool, rings[n], at, key[n : n + 1], value[n : n + 1])
        if page:
            states = read_ring(layout, pool, rings[n], at + 1 - layout.tokens, at + 1)
            write_pages(layout, pool, full[n : n + 1], *states)


def causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention whose last query sees all keys, in fp32.

    query: [T, Hq, D]. keys, values: [n, H, D]. Returns [T, Hq, D].
    """
    new, tokens, each = len(query), len(keys), query.shape[1] // keys.shape[1]
    grouped = query.float().unflatten(1, (keys.shape[1], each))
    scores = torch.einsum("qhgd,nhd->hgqn", grouped, keys.float()) * scale
    seen = torch.arange(tokens - new, tokens, device=query.device)[:, None]
    later = torch.arange(tokens, device=query.device) > seen
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hgqn,nhd->qhgd", weights, values.float()).flatten(1, 2).to(query.dtype)


@dataclass
class Chunk:
    """New tokens of one request in one layer.

    pages: [pages of the request], in order; those beyond the last whole page are not read. blocks:
    [rings]. states: q [T, Hq, D], k and v [T, H, D]. context: tokens before. stored: False for rows
    that fill up a batch, whose tokens have no slot. first: number of the first new token in the
    batch.

    Requests of one step may share pages that are written in this very step. So an engine opens all
    chunks, then keeps all, and then attends.
    """

    layout: PageLayout
    pool: Tensor
    pages: Tensor
    blocks: Tensor
    states: tuple[Tensor, Tensor, Tensor]
    context: int
    stored: bool = True
    first: int = 0

    @property
    def end(self) -> int:
        """Number of the token after the last new one."""
        return self.first + len(self.states[0])

    @property
    def whole(self) -> int:
        """Pages that were full before."""
        return self.context // self.layout.tokens

    def open(self) -> None:
        """Read the tokens after the last whole page: the ring's, then the new ones."""
        layout, new = self.layout, self.states[1:]
        first = self.whole * layout.tokens
        if self.context == first:
            self.opened = new
            return
        old = read_ring(layout, self.pool, self.blocks, first, self.context)
        self.opened = tuple(torch.cat(x) for x in zip(old, new, strict=True))

    def keep(self) -> None:
        """Pack the pages that are full now, and put the rest in the ring."""
        if not self.stored:
            return
        layout = self.layout
        done = len(self.opened[0]) // layout.tokens
        cut = done * layout.tokens
        if done:
            full = (x[:cut] for x in self.opened)
            write_pages(layout, self.pool, self.pages[self.whole : self.whole + done], *full)
        first = (self.whole + done) * layout.tokens
        write_ring(layout, self.pool, self.blocks, first, *(x[cut:] for x in self.opened))

    def attend(self, scale: float) -> Tensor:
        """Attention of the new tokens over all, [T, Hq, D].

        Past pages count as they are packed. Tokens of the ring and of this step are exact.
        """
        states = self.opened
        if self.whole:
            past = read_pages(self.layout, self.pool, self.pages[: self.whole])
            states = (torch.cat(x) for x in zip(past, states, strict=True))
        return causal(self.states[0], *states, scale)


def _both(spec: KVSpec) -> tuple[TensorSpec, TensorSpec]:
    return spec.key, spec.value


def _bare(layout: PageLayout, spec: TensorSpec, pages: int, device: torch.device) -> PackedTensor:
    """A stream of whole pages of one sequence, without its tensors."""
    table = BlockTable.uniform(1, pages * layout.tokens, spec.row_tokens, device)
    return PackedTensor(spec, layout.head_dim, layout.dtype, table, None, None)
