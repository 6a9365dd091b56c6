"""Pages of a served cache: packed tiles by block table, and rings for tokens of unfinished ones.

The plain-torch reference of all that an engine asks of a layer. A page holds some tokens of one
request in group records with their scales, so that requests share pages one by one. Tokens are
packed when the last one of a page comes. Until then they are in 16 bit in ring pages of the
request, at slot position % ring tokens.

Shapes: T new tokens of one request, H kv heads, D channels, P pages of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from duotone.attention.cuda.groups.format import GroupFormat, format_of
from duotone.attention.cuda.groups.layout import to_group_records
from duotone.attention.cuda.groups.records import GroupRecords
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.packed import pack_groups
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
        """Pages as 16-bit tokens. pool as in `records` -> [P, H, ring_rows, 2, D], K then V."""
        used = self.ring_rows * 2 * self.head_dim * self.dtype.itemsize
        dense = self.records(pool)[:, :, :used].view(self.dtype)
        return dense.unflatten(2, (self.ring_rows, 2, self.head_dim))


def read_pages(layout: PageLayout, pool: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of whole pages, [pages * tokens, H, D] each, fp32.

    pool: [P, H, tokens, token_bytes] uint8. pages: [pages], numbers in the pool, in order.
    """
    if not len(pages):
        nothing = pool.new_zeros(0, pool.shape[1], layout.head_dim, dtype=torch.float32)
        return nothing, nothing
    data = layout.records(pool)[pages.long()].transpose(0, 1)[None].contiguous()
    bare = [_bare(layout, spec, len(pages), pool.device) for spec in _both(layout.spec)]
    both = GroupRecords(layout.form, data).canonical(*bare)
    return tuple(x.dequantize()[0].transpose(0, 1).float() for x in both)


def write_pages(
    layout: PageLayout, pool: Tensor, pages: Tensor, key: Tensor, value: Tensor
) -> None:
    """Quantize whole pages of tokens into the pool.

    key, value: [pages * tokens, H, D] in `layout.dtype`.
    """
    packed = []
    for x, spec in zip((key, value), _both(layout.spec), strict=True):
        heads_first = x.transpose(0, 1)[None]
        table = _bare(layout, spec, len(pages), x.device).blocks
        parts = pack_groups(heads_first, spec)
        packed.append(PackedTensor(spec, layout.head_dim, layout.dtype, table, **parts))
    records = to_group_records(*packed, layout.form)[0]
    layout.records(pool)[pages.long()] = records.transpose(0, 1)


def read_ring(
    layout: PageLayout, rings: Sequence[Tensor], blocks: Tensor, first: int, end: int
) -> tuple[Tensor, Tensor]:
    """K and V of the tokens from `first` to `end`, [end - first, H, D] each.

    rings: the pool of each ring page, as in `PageLayout.records`. blocks: [rings], the request's
    pages in them.
    """
    slots = torch.arange(first, end, device=blocks.device) % layout.ring_tokens
    rows = torch.cat([layout.rows(x)[b] for x, b in zip(rings, blocks, strict=True)], 1)
    both = rows[:, slots]
    return both[:, :, 0].transpose(0, 1), both[:, :, 1].transpose(0, 1)


def write_ring(
    layout: PageLayout,
    rings: Sequence[Tensor],
    blocks: Tensor,
    first: int,
    key: Tensor,
    value: Tensor,
) -> None:
    """Put tokens from position `first` on into a ring. key, value: [n, H, D], n <= ring_tokens."""
    for at in range(len(key)):
        ring, row = divmod((first + at) % layout.ring_tokens, layout.ring_rows)
        kept = layout.rows(rings[ring])[blocks[ring], :, row]
        kept[:, 0], kept[:, 1] = key[at], value[at]


def append_and_attend(
    layout: PageLayout,
    pool: Tensor,
    rings: Sequence[Tensor],
    pages: Tensor,
    blocks: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    context: int,
    scale: float,
    stored: bool = True,
) -> Tensor:
    """Attention of T new tokens of one request over all before them; then keep these, too.

    pool, rings, blocks: as above. pages: [pages of a request], in order; those beyond the last
    whole page are not used. states: q [T, Hq, D], k and v [T, H, D]. context: tokens before.
    stored: False for rows that fill up a batch, whose tokens have no slot. Returns [T, Hq, D].

    Past pages count as they are packed, also those of this very request; own tokens of this step
    and those of the ring are exact.
    """
    query, key, value = states
    whole = context // layout.tokens
    parts = [(key, value)]
    if context > whole * layout.tokens:
        parts.insert(0, read_ring(layout, rings, blocks, whole * layout.tokens, context))
    open_key, open_value = (torch.cat(x) for x in zip(*parts, strict=True))
    keys, values = open_key.float(), open_value.float()
    if whole:
        past = read_pages(layout, pool, pages[:whole])
        keys, values = (torch.cat(x) for x in zip(past, (keys, values), strict=True))
    out = _causal(query, keys, values, scale)
    if stored:
        _keep(layout, pool, rings, pages, blocks, (open_key, open_value), whole)
    return out


def _keep(
    layout: PageLayout,
    pool: Tensor,
    rings: Sequence[Tensor],
    pages: Tensor,
    blocks: Tensor,
    open_states: tuple[Tensor, Tensor],
    whole: int,
) -> None:
    """Pack the pages that are full now, leave the rest in the ring. open_states: after `whole`."""
    done = len(open_states[0]) // layout.tokens
    cut = done * layout.tokens
    if done:
        full = (x[:cut] for x in open_states)
        write_pages(layout, pool, pages[whole : whole + done], *full)
    first = (whole + done) * layout.tokens
    write_ring(layout, rings, blocks, first, *(x[cut:] for x in open_states))


def _causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention whose last query sees all keys, in fp32. keys: [n, H, D]."""
    new, tokens, each = len(query), len(keys), query.shape[1] // keys.shape[1]
    grouped = query.float().unflatten(1, (keys.shape[1], each))
    scores = torch.einsum("qhgd,nhd->hgqn", grouped, keys) * scale
    seen = torch.arange(tokens - new, tokens, device=query.device)[:, None]
    later = torch.arange(tokens, device=query.device) > seen
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hgqn,nhd->qhgd", weights, values).flatten(1, 2).to(query.dtype)


def _both(spec: KVSpec) -> tuple[TensorSpec, TensorSpec]:
    return spec.key, spec.value


def _bare(layout: PageLayout, spec: TensorSpec, pages: int, device: torch.device) -> PackedTensor:
    """A stream of whole pages of one sequence, without its tensors."""
    tokens = pages * layout.tokens
    size = tokens if spec.along == "channels" else spec.group
    table = BlockTable.uniform(1, tokens, size, device)
    return PackedTensor(spec, layout.head_dim, layout.dtype, table, None, None)
