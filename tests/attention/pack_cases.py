"""Cases of packing kernels, on a GPU and on the CPU: what to pack, and what torch makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from duotone.attention.cuda.group_format import TILE, GroupFormat, operand_of
from duotone.attention.cuda.group_layout import to_group_records
from duotone.attention.cuda.group_pack import group_pack
from duotone.attention.cuda.layout import RecordFormat, span_layout
from duotone.attention.cuda.span_pack import span_pack
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.ledger import Piece
from duotone.cache.packed import pack_groups
from duotone.cache.pair import PackedPair
from duotone.cache.ragged import Move
from duotone.quant import KVSpec, TensorSpec

from cases import device, states

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
POISON = 0xAA


def kivi(bits: int, group: int = 32, **more) -> KVSpec:
    return KVSpec(
        TensorSpec(bits, "tokens", group, **more), TensorSpec(bits, "channels", group, **more)
    )


def inner(bits: int, mapping: str = "asymmetric", **more) -> KVSpec:
    return KVSpec(
        TensorSpec(bits, "channels", 32, mapping, **more),
        TensorSpec(bits, "tokens", 32, mapping, **more),
    )


@dataclass(frozen=True)
class GroupCase:
    """tiles: real ones of each sequence; room: tiles of `data` before and behind them, at least."""

    specs: KVSpec
    head_dim: int = 64
    tiles: tuple[int, ...] = (5, 0, 3)
    dtype: torch.dtype = BF16
    norm: torch.dtype | None = None
    decoding: bool = False
    offset: int = 0
    heads: int = 2

    def __str__(self) -> str:
        key, value = self.specs.key, self.specs.value
        names = [f"{x.bits}{x.along}{x.mapping[:3]}{x.group or ''}" for x in (key, value)]
        more = {"norm": self.norm, "decoding": self.decoding, f"offset{self.offset}": self.offset}
        more["shrink"] = key.shrink != 1
        flags = [name for name, wanted in more.items() if wanted]
        kind = str(self.dtype).removeprefix("torch.")
        return "-".join([*names, f"d{self.head_dim}{kind}", *flags])

    @property
    def form(self) -> GroupFormat:
        both = (("key", self.specs.key), ("value", self.specs.value))
        operands = (operand_of(spec, self.head_dim, name) for name, spec in both)
        return GroupFormat(self.head_dim, *operands)


SIGNED = ("symmetric", "hybrid")
# In an order in which every third is of another width, mapping and head_dim.
GROUP_CASES = [
    *(GroupCase(kivi(bits), 128) for bits in (4, 2, 1)),
    *(GroupCase(inner(bits)) for bits in (2, 1, 4)),
    *(GroupCase(inner(b, m), d) for b, m, d in product((1, 2, 4), SIGNED, (64, 128))),
    *(GroupCase(inner(b, m), 96) for b, m in product((4, 2, 1), reversed(SIGNED))),
    *(GroupCase(kivi(2, shrink=0.9), d, dtype=FP16) for d in (32, 96, 256)),
    *(GroupCase(KVSpec(*[TensorSpec(b, "tokens", 32)] * 2), 80, dtype=FP32) for b in (1, 4)),
    GroupCase(KVSpec(TensorSpec(2, "tokens", 32), TensorSpec(1, "tokens", 128)), 100, (4, 8)),
    GroupCase(KVSpec(TensorSpec(1, "tokens", 64), TensorSpec(4, "tokens", 128)), 111, (4, 8)),
    GroupCase(kivi(4, 64), 128, (4, 2), FP32),
    GroupCase(KVSpec(TensorSpec(1, "channels"), TensorSpec(2, "channels", 64)), 128, dtype=FP16),
    *(GroupCase(inner(2, "hybrid"), 64, dtype=d, norm=n) for d, n in ((BF16, FP16), (FP16, FP16))),
    GroupCase(inner(1, "symmetric"), 96, dtype=FP32, norm=FP32),
    GroupCase(inner(2, "hybrid", hybrid_at="prefill"), decoding=True),
    GroupCase(inner(2, "hybrid", hybrid_at="prefill"), decoding=False),
    GroupCase(KVSpec(TensorSpec(2, "tokens", 32), inner(2, "symmetric").value), 80),
    GroupCase(KVSpec(TensorSpec(2, "tokens", 32), inner(2, "hybrid").value), 80),
    GroupCase(inner(2, shrink=0.95), 128, offset=1),
    GroupCase(kivi(2), 128, offset=2, dtype=FP32),
]


def dense_states(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
    """K or V in a wider buffer, with a constant channel and a token of zeros.

    offset: elements that rows are moved by, so that they lose their alignment.
    """
    batch, heads, n, d = shape
    wide = torch.zeros(batch, n, heads, d + offset, device=device()).transpose(1, 2)
    wide[..., offset:] = states(batch, heads, n, d)
    wide[..., offset + 3] = 0.3
    wide[:, :, 1] = 0
    return wide.to(dtype)[..., offset:]


def run_groups(case: GroupCase, seed: int = 0):
    """(data as the kernel left it, data as it must be, hybrid margins, overflow)."""
    torch.manual_seed(seed)
    batch, most = len(case.tiles), max(case.tiles)
    n = TILE * most + 41
    shape = (batch, case.heads, n, case.head_dim)
    key, value = (dense_states(shape, case.dtype, case.offset) for _ in range(2))
    key[:, :, 1] = -0.0  # the token of zeros: torch may take either where both kinds meet
    index = torch.stack([torch.randperm(n)[: TILE * most] for _ in range(batch)]).to(device())
    norm = None
    if case.norm is not None:
        norm = (0.5 + torch.rand(batch, case.heads, case.head_dim, device=device())).to(case.norm)
    form = case.form
    records = -(-(most + batch) // form.tiles) + 1
    where = torch.arange(batch, device=device())
    data = torch.full(
        (batch, case.heads, records, form.nbytes), POISON, dtype=torch.uint8, device=device()
    )
    expected = data.clone()
    for b, count in enumerate(case.tiles):
        taken = [x[b : b + 1].index_select(2, index[b, : count * TILE]) for x in (key, value)]
        if norm is not None:
            taken[0] = (taken[0] / norm[b : b + 1, :, None]).to(case.dtype)
        if count:
            at = expected[b].view(case.heads, -1, form.tile_bytes)
            at[:, b : b + count] = reference_tiles(case, *taken)
    # What lies behind the real tiles must not be read.
    for b, count in enumerate(case.tiles):
        index[b, count * TILE :] = 1 << 40
    overflow = torch.zeros(1, dtype=torch.int32, device=device())
    tiles = torch.tensor(case.tiles, device=device())
    group_pack(
        key, value, index, tiles, where, form, case.specs, data, norm,
        overflow=overflow, decoding=case.decoding,
    )  # fmt: skip
    return data, expected, int(overflow)


def reference_tiles(case: GroupCase, key: Tensor, value: Tensor) -> Tensor:
    """[kv_heads, tiles, tile_bytes] of one sequence's tokens by torch."""
    tokens, packed = key.shape[2], []
    for x, spec in ((key, case.specs.key), (value, case.specs.value)):
        step = tokens if spec.along == "channels" else spec.group
        edges = torch.arange(0, tokens + 1, step, device=x.device)
        parts = pack_groups(x, spec, case.decoding)
        packed.append(PackedTensor(spec, case.head_dim, x.dtype, BlockTable(edges[None]), **parts))
    records = to_group_records(*packed, case.form)
    return records.view(len(records[0]), -1, case.form.tile_bytes)[:, : tokens // TILE]


@dataclass(frozen=True)
class SpanCase:
    """Visual spans of ragged sequences. edges: offsets of each sequence's spans."""

    edges: tuple[tuple[int, ...], ...] = ((0, 300, 431), (0, 100, 100))
    bits: tuple[int, int] = (1, 1)
    head_dim: int = 128
    dtype: torch.dtype = BF16
    shrink: float = 1.0
    group: int | None = None
    offset: int = 0
    heads: int = 2

    def __str__(self) -> str:
        key, value = self.bits
        kind = str(self.dtype).removeprefix("torch.")
        more = {"shrink": self.shrink != 1, f"g{self.group}": self.group}
        more |= {f"offset{self.offset}": self.offset, f"n{self.edges[0][-1]}": True}
        flags = [name for name, wanted in more.items() if wanted]
        return "-".join([f"k{key}v{value}d{self.head_dim}{kind}", *flags])

    @property
    def spec(self) -> KVSpec:
        return KVSpec(*(TensorSpec(b, group=self.group, shrink=self.shrink) for b in self.bits))

    @property
    def form(self) -> RecordFormat:
        return RecordFormat(self.head_dim, *self.bits)

    @property
    def longest(self) -> int:
        """Tokens of the longest block."""
        return self.group or max(int(torch.tensor(edges).diff().max()) for edges in self.edges)


SPAN_CASES = [
    *(SpanCase(bits=bits) for bits in ((1, 1), (2, 2), (4, 4), (8, 8), (1, 4), (8, 2))),
    *(SpanCase(head_dim=d, dtype=FP16, shrink=0.9) for d in (32, 96, 100, 256)),
    SpanCase(head_dim=111, bits=(2, 4), offset=1),
    SpanCase(head_dim=80, dtype=FP32, bits=(4, 1)),
    SpanCase(head_dim=64, dtype=FP32, offset=2, shrink=0.5),
    SpanCase(((0, 512), (0, 512)), bits=(2, 2)),
    SpanCase(((0, 111), (0, 0), (0, 63)), bits=(4, 4), head_dim=64),
    SpanCase(((0, 700), (0, 333)), bits=(2, 1), head_dim=64, group=128),
    SpanCase(((0, *(100 * i for i in range(1, 41))),), head_dim=32, heads=1),
    SpanCase(((0, 1),) * 5 + ((0, 200),), heads=1),
]


def run_spans(case: SpanCase, seed: int = 0) -> tuple[PackedPair, PackedPair]:
    """(pair of the kernel, pair of torch): the taken tokens lie anywhere in wider K and V."""
    torch.manual_seed(seed)
    offsets = torch.tensor(case.edges, device=device())
    batch, most = len(case.edges), int(offsets.max())
    shape = (batch, case.heads, most + 29, case.head_dim)
    key, value = (dense_states(shape, case.dtype, case.offset) for _ in range(2))
    index = torch.stack([torch.randperm(shape[2])[:most] for _ in range(batch)]).to(device())
    spans = BlockTable(offsets)
    piece = Piece(Move(index, spans.lengths), spans, Move(index, spans.lengths))
    expected = PackedPair.pack(key, value, case.spec, piece).laid_out(span_layout)
    assert expected.records is not None
    return span_pack(key, value, case.spec, piece, case.form), expected


def assert_same_pair(actual: PackedPair, expected: PackedPair) -> None:
    """Every byte and parameter, and what describes them."""
    assert torch.equal(actual.records.first, expected.records.first)
    assert actual.records.data.shape == expected.records.data.shape
    assert torch.equal(actual.records.data, expected.records.data)
    for name in ("key", "value"):
        one, other = getattr(actual, name), getattr(expected, name)
        assert (one.spec, one.head_dim, one.dtype) == (other.spec, other.head_dim, other.dtype)
        assert one.blocks.same_as(other.blocks)
        assert one.codes is None
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(one.zero_point, other.zero_point)
