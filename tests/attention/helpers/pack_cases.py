"""Cases of packing kernels, on a GPU and on the CPU: what to pack, and what torch makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from duotone.attention.cuda.classes.pack import sorted_levels
from duotone.attention.cuda.groups.format import TILE, GroupFormat, operand_of
from duotone.attention.cuda.groups.pack import group_pack
from duotone.attention.cuda.groups.records import GroupRecords
from duotone.attention.cuda.spans.layout import RecordFormat, span_layout
from duotone.attention.cuda.spans.pack import span_pack
from duotone.attention.cuda.spans.searched import searched_pack
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.ledger import Piece
from duotone.cache.packing import pack_groups
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
    """tiles: real ones of each sequence. apart: "key", "value": whose codes lie apart; lent: whose
    codes another layer keeps, so that they are not written. swing: of some channels and tokens of
    the first head, beside a bias: a large one makes tiles wide.
    """

    specs: KVSpec
    head_dim: int = 64
    tiles: tuple[int, ...] = (5, 0, 3)
    dtype: torch.dtype = BF16
    norm: torch.dtype | None = None
    decoding: bool = False
    offset: int = 0
    heads: int = 2
    apart: tuple[str, ...] = ()
    lent: tuple[str, ...] = ()
    swing: float = 0.0

    def __str__(self) -> str:
        key, value = self.specs.key, self.specs.value
        names = [f"{x.bits}{x.along}{x.mapping[:3]}{x.group or ''}" for x in (key, value)]
        more = {"norm": self.norm, "decoding": self.decoding, f"offset{self.offset}": self.offset}
        more |= {"shrink": key.shrink != 1, "eta": key.eta != 0}
        more |= {f"apart{x}": True for x in self.apart} | {f"lent{x}": True for x in self.lent}
        more |= {f"swing{self.swing:g}": self.swing}
        flags = [name for name, wanted in more.items() if wanted]
        kind = str(self.dtype).removeprefix("torch.")
        return "-".join([*names, f"d{self.head_dim}{kind}", *flags])

    @property
    def form(self) -> GroupFormat:
        both = (("key", self.specs.key), ("value", self.specs.value))
        operands = (operand_of(spec, self.head_dim, name) for name, spec in both)
        parts = (
            replace(x, apart=name in self.apart)
            for x, (name, _) in zip(operands, both, strict=True)
        )
        return GroupFormat(self.head_dim, *parts)


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
    *(GroupCase(kivi(bits, eta=eta), 128) for bits, eta in ((2, 0.045), (1, 1 / 6))),
    GroupCase(inner(2, eta=0.3), 96, dtype=FP16),
]
K, V = "key", "value"
# A range of 192 is where a tile of 2 bits becomes wide.
LARGE_CASES = [
    *(GroupCase(kivi(bits), 128, swing=s) for bits, s in ((2, 96.0), (2, 1500.0), (1, 3000.0))),
    GroupCase(kivi(4), 64, swing=8000.0, dtype=FP16),
    GroupCase(kivi(2, 128), 128, (4, 8), swing=1500.0, dtype=FP32),
    GroupCase(
        KVSpec(TensorSpec(2, "tokens", 64), TensorSpec(1, "tokens", 128)), 100, (4, 8), swing=1500.0
    ),
    GroupCase(kivi(2), 96, apart=(K, V), swing=1500.0),
    *(GroupCase(inner(2, m), swing=1500.0) for m in ("asymmetric", "symmetric", "hybrid")),
    GroupCase(KVSpec(*[TensorSpec(2, "tokens", 32, eta=0.045)] * 2), 80, swing=900.0),
    # Groups along channels with one large channel keep their end points.
    *(GroupCase(kivi(bits, eta=eta), 128, swing=3.0) for bits, eta in ((2, 0.045), (1, 1 / 6))),
    GroupCase(kivi(2, 64, eta=0.1), 128, (4, 2), FP32, swing=3.0),
    GroupCase(inner(1, eta=1 / 6), 96, dtype=FP16, swing=3.0),
]
APART_CASES = [
    GroupCase(kivi(2), 128, apart=(K, V)),
    GroupCase(kivi(1), 96, (5, 0, 7), apart=(V,)),
    GroupCase(inner(4), apart=(K,)),
    GroupCase(kivi(2), 128, apart=(K, V), lent=(K,), dtype=FP16),
    GroupCase(inner(1), 64, apart=(K, V), lent=(K, V), dtype=FP32),
    GroupCase(KVSpec(TensorSpec(2, "tokens", 32), inner(2, "hybrid").value), 80, apart=(K,)),
    GroupCase(KVSpec(TensorSpec(1, "tokens", 64), kivi(4, 128).value), 128, (4, 8), apart=(K,)),
]


def dense_states(
    shape: tuple[int, ...], dtype: torch.dtype, offset: int, zero: float = 0.0
) -> Tensor:
    """K or V in a wider buffer, with a constant channel and a token of `zero`.

    offset: elements that rows are moved by, so that they lose their alignment.
    """
    batch, heads, n, d = shape
    wide = torch.zeros(batch, n, heads, d + offset, device=device()).transpose(1, 2)
    wide[..., offset:] = states(batch, heads, n, d)
    wide[..., offset + 3] = 0.3
    wide[:, :, 1] = zero
    return wide.to(dtype)[..., offset:]


def run_groups(case: GroupCase, seed: int = 0):
    """(buffers as the kernel left them, buffers as they must be, overflow)."""
    torch.manual_seed(seed)
    batch, most = len(case.tiles), max(case.tiles)
    n = TILE * most + 41
    shape = (batch, case.heads, n, case.head_dim)
    # The token of zeros: torch may take either where both kinds meet.
    zeros = -0.0, 0.0
    key, value = (dense_states(shape, case.dtype, case.offset, zero) for zero in zeros)
    if case.swing:
        make_large(key, case.swing)
        make_large(value, case.swing)
    index = torch.stack([torch.randperm(n)[: TILE * most] for _ in range(batch)]).to(device())
    norm = None
    if case.norm is not None:
        norm = (0.5 + torch.rand(batch, case.heads, case.head_dim, device=device())).to(case.norm)
    buffers = poison_buffers(case)
    expected = [None if x is None else x.clone() for x in buffers]
    for b, count in enumerate(case.tiles):
        rows = index[b, : count * TILE]
        taken = [x[b : b + 1].index_select(2, rows) for x in (key, value)]
        if norm is not None:
            taken[0] = (taken[0] / norm[b : b + 1, :, None]).to(case.dtype)
        for x, tiles in zip(expected, reference_tiles(case, *taken) if count else (), strict=False):
            if x is not None:
                # Rooms behind whole records hold whole tiles.
                x[b].view(case.heads, -1, tiles.shape[2])[:, b : b + count] = tiles
    # What lies behind the real tiles must not be read.
    for b, count in enumerate(case.tiles):
        index[b, count * TILE :] = 1 << 40
    overflow = torch.zeros(1, dtype=torch.int32, device=device())
    tiles, where = torch.tensor(case.tiles, device=device()), torch.arange(batch, device=device())
    data, *codes = buffers
    group_pack(
        key, value, index, tiles, where, case.form, case.specs, data, norm,
        codes=tuple(codes), overflow=overflow, decoding=case.decoding,
    )  # fmt: skip
    joined = (
        torch.cat([x.flatten(2) for x in found if x is not None], -1)
        for found in (buffers, expected)
    )
    return *joined, int(overflow)


def make_large(x: Tensor, swing: float) -> None:
    """Channels and tokens of the first head that swing, and a bias of 1,000: in place."""
    x[:, 0, ::97] *= swing
    x[:, 0, ::2, 5] += swing
    x[:, 0, 1::2, 5] -= swing
    x[:, 0, :, 9] += 1000


def poison_buffers(case: GroupCase) -> list[Tensor | None]:
    """Records and the codes that lie apart and are kept, with more room than is needed."""
    form, shape = case.form, (len(case.tiles), case.heads)
    records = -(-(max(case.tiles) + len(case.tiles)) // form.tiles) + 1
    sizes = [(records, form.own_nbytes)]
    for name, nbytes in zip((K, V), form.part_bytes, strict=False):
        kept = name in case.apart and name not in case.lent
        sizes.append((records * form.tiles + 3, nbytes) if kept else None)
    fill = {"dtype": torch.uint8, "device": device()}
    return [None if x is None else torch.full((*shape, *x), POISON, **fill) for x in sizes]


def reference_tiles(case: GroupCase, key: Tensor, value: Tensor) -> list[Tensor | None]:
    """[kv_heads, tiles, bytes] of one sequence's tokens by torch: records, codes that lie apart."""
    tokens, packed = key.shape[2], []
    for x, spec in ((key, case.specs.key), (value, case.specs.value)):
        step = tokens if spec.along == "channels" else spec.group
        edges = torch.arange(0, tokens + 1, step, device=x.device)
        parts = pack_groups(x, spec, case.decoding)
        packed.append(PackedTensor(spec, case.head_dim, x.dtype, BlockTable(edges[None]), **parts))
    records = GroupRecords.of(*packed, case.form)
    found = (records.tiles, *records.codes)
    return [None if x is None else x[0, :, : tokens // TILE] for x in found]


@dataclass(frozen=True)
class SpanCase:
    """Visual spans of ragged sequences. edges: offsets of each sequence's spans.

    levels: fields of K and of V whose levels are searched.
    """

    edges: tuple[tuple[int, ...], ...] = ((0, 300, 431), (0, 100, 100))
    bits: tuple[int, int] = (1, 1)
    head_dim: int = 128
    dtype: torch.dtype = BF16
    shrink: float = 1.0
    group: int | None = None
    offset: int = 0
    heads: int = 2
    levels: tuple[tuple[tuple[str, object], ...], ...] = ((), ())

    def __str__(self) -> str:
        key, value = self.bits
        kind = str(self.dtype).removeprefix("torch.")
        more = {"shrink": self.shrink != 1, f"g{self.group}": self.group}
        more |= {f"offset{self.offset}": self.offset, f"n{self.edges[0][-1]}": True}
        more |= {f"{name}{value}": True for name, value in self.levels[0]}
        flags = [name for name, wanted in more.items() if wanted]
        return "-".join([f"k{key}v{value}d{self.head_dim}{kind}", *flags])

    @property
    def spec(self) -> KVSpec:
        plain = (TensorSpec(b, group=self.group, shrink=self.shrink) for b in self.bits)
        return KVSpec(*(x.replace(**dict(y)) for x, y in zip(plain, self.levels, strict=True)))

    @property
    def form(self) -> RecordFormat:
        return RecordFormat(self.head_dim, *self.bits)

    @property
    def longest(self) -> int:
        """Tokens of the longest block."""
        return self.group or max(int(torch.tensor(edges).diff().max()) for edges in self.edges)


SPAN_CASES = [
    *(SpanCase(bits=bits) for bits in ((1, 1), (2, 2), (4, 4), (8, 8), (1, 4), (8, 2), (3, 3))),
    *(SpanCase(head_dim=d, dtype=FP16, shrink=0.9) for d in (32, 96, 100, 256)),
    SpanCase(head_dim=111, bits=(2, 4), offset=1),
    SpanCase(head_dim=80, dtype=FP32, bits=(4, 1)),
    *(SpanCase(head_dim=d, bits=b, dtype=FP16) for d, b in ((64, (3, 1)), (111, (2, 3)))),
    SpanCase(head_dim=64, dtype=FP32, offset=2, shrink=0.5),
    SpanCase(((0, 512), (0, 512)), bits=(2, 2)),
    SpanCase(((0, 111), (0, 0), (0, 63)), bits=(4, 4), head_dim=64),
    SpanCase(((0, 700), (0, 333)), bits=(2, 1), head_dim=64, group=128),
    SpanCase(((0, *(100 * i for i in range(1, 41))),), head_dim=32, heads=1),
    SpanCase(((0, 1),) * 5 + ((0, 200),), heads=1),
]


LLOYD = (("levels", "lloyd"),)
BY_ENERGY = tuple(
    (*LLOYD, ("energy", energy), ("gain", gain), ("param_dtype", "float8"))
    for energy, gain in ((1.0, "fit"), (1.5, 1.1))
)
SEARCHED_CASES = [
    SpanCase(bits=(4, 2), levels=BY_ENERGY),
    SpanCase(bits=(2, 1), levels=BY_ENERGY[::-1], head_dim=64),
    SpanCase(bits=(4, 4), levels=(LLOYD, LLOYD), dtype=FP16),
    SpanCase(bits=(1, 1), levels=((("gain", 1.3),), LLOYD), head_dim=96, offset=1),
    SpanCase(bits=(2, 4), levels=BY_ENERGY, head_dim=80, dtype=FP32),
    SpanCase(((0, 700), (0, 333)), (2, 1), 64, group=128, levels=BY_ENERGY),
    SpanCase(((0, 111), (0, 0), (0, 63)), (4, 1), 64, levels=(LLOYD, ()), shrink=0.9),
    SpanCase(((0, *(100 * i for i in range(1, 41))),), (1, 2), 32, heads=1, levels=BY_ENERGY),
]


def run_spans(case: SpanCase, seed: int = 0) -> tuple[PackedPair, PackedPair]:
    """(pair of the kernel, pair of torch): the taken tokens lie anywhere in wider K and V."""
    torch.manual_seed(seed)
    offsets = torch.tensor(case.edges, device=device())
    batch, most = len(case.edges), int(offsets.max())
    shape = (batch, case.heads, most + 29, case.head_dim)
    key, value = (dense_states(shape, case.dtype, case.offset) for _ in range(2))
    piece = taken_anywhere(offsets, shape[2])
    expected = PackedPair.pack(key, value, case.spec, piece).laid_out(span_layout)
    assert expected.records is not None
    if case.levels == ((), ()):
        return span_pack(key, value, case.spec, piece), expected
    if key.is_cuda:
        expected = by_levels_of_kernels(key, value, case.spec, piece)
    return searched_pack(key, value, case.spec, piece), expected


def by_levels_of_kernels(key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair:
    """Records that torch makes by the levels that kernels find on a GPU."""
    pair = []
    for x, of in ((key, spec.key), (value, spec.value)):
        taken = piece.take.apply(x)
        pair.append(sorted_levels(taken, of, piece.spans, x.shape[3]).packed(taken, of))
    return PackedPair(*pair).laid_out(span_layout)


def taken_anywhere(offsets: Tensor, tokens: int) -> Piece:
    """Spans of tokens that lie anywhere among `tokens`."""
    batch, most = len(offsets), int(offsets.max())
    index = torch.stack([torch.randperm(tokens)[:most] for _ in range(batch)]).to(device())
    spans = BlockTable(offsets)
    return Piece(Move(index, spans.lengths), spans, Move(index, spans.lengths))


def assert_same_pair(actual: PackedPair, expected: PackedPair) -> None:
    """Every byte and parameter, and what describes them."""
    assert actual.records.format == expected.records.format
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
