"""Time from dense K and V to packed ones, by the packing kernels, against a copy of K and V.

A copy reads and writes 16 bits per element; a kernel reads 16 bits and writes codes and scales. So
`over_copy` below 1 is possible. No scheme without quantization is faster than the copy. Spans are
read twice, for the bounds and for the codes, except where clusters hold a whole span. Rows of
classes of channels time the codes alone, everything ("with levels"), or single eager calls of torch
without a kernel ("by torch"). All sequences are whole, so that the numbers measure bandwidth. Every
row is first compared with torch, byte for byte; classes use the levels that kernels find (tests
compare these levels with torch's).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import duotone
from duotone.attention.cuda.classes.layout import class_layout
from duotone.attention.cuda.classes.pack import class_pack, pack_codes, prepared
from duotone.attention.cuda.groups.format import TILE, GroupFormat, operand_of
from duotone.attention.cuda.groups.layout import to_group_records
from duotone.attention.cuda.groups.pack import group_pack, page_pack
from duotone.attention.cuda.spans.layout import span_layout
from duotone.attention.cuda.spans.pack import span_pack
from duotone.bench.shapes import Shape
from duotone.bench.timing import METHODS, Clock, Deadline, clean_us, measure, rotated_count
from duotone.cache import BlockTable
from duotone.cache.ledger import Piece
from duotone.cache.pair import PackedPair
from duotone.cache.ragged import Move
from duotone.quant import KVSpec, TensorSpec
from duotone.quant.checks import unchecked
from duotone.serve.pages import served_spec

SHAPES = (Shape(1, 32, 8, 3328), Shape(8, 32, 8, 8192), Shape(32, 32, 8, 8192))
CHECKED = Shape(2, 4, 2, 512)
SYMMETRIC, HYBRID = "innerq-2 symmetric", "innerq-2 hybrid"
# As calibration writes them.
COEFFICIENTS = ((4, 1 / 8), (2, 1 / 8), (1, 1 / 4))
# Allowed differences of a hybrid: torch's order of a sum decides near ties between mappings.
NEAR_TIES = 1e-3
EAGER_REPEATS = 3
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Packing:
    """A row: how K and V are quantized; whole spans, or groups. paged: into pages of a pool."""

    name: str
    spec: KVSpec
    paged: bool = False

    @property
    def classes(self) -> bool:
        """Channels of unequal bits."""
        return bool(self.spec.key.classes or self.spec.value.classes)

    @property
    def spans(self) -> bool:
        """A scale per channel for all tokens, of one width."""
        return self.spec.key.group is None and not self.classes

    def call(self, key: Tensor, value: Tensor, piece: Piece) -> Call:
        """The timed call; returns all that it writes except a span's scales.

        piece: `all_tokens`. As in a model's layers, buffers share it: the offsets of its records
        are read from the device once.
        """
        if self.classes:
            return self._class_codes(key, value, piece)
        if self.spans:
            return lambda: span_pack(key, value, self.spec, piece).records.data
        if self.paged:
            return self._into_pages(key, value)
        form, index = self._form(key), piece.take.index
        tiles = piece.spans.lengths // TILE
        start = torch.zeros_like(tiles)
        records = -(-key.shape[2] // form.tokens)
        data = key.new_zeros(*key.shape[:2], records, form.nbytes, dtype=torch.uint8)

        def pack() -> Tensor:
            group_pack(key, value, index, tiles, start, form, self.spec, data)
            return data

        return pack

    def _into_pages(self, key: Tensor, value: Tensor) -> Call:
        """All sequences as one: token t of sequence b is b * kv_heads * tokens + t."""
        form, (batch, heads, tokens, width) = self._form(key), key.shape
        size = (1, heads, (batch - 1) * heads * tokens + tokens, width)
        states = [x.as_strided(size, (x.numel(), *x.stride()[1:])) for x in (key, value)]
        first = torch.arange(batch, device=key.device)[:, None] * heads * tokens
        index = (first + torch.arange(tokens, device=key.device)).flatten()[None]
        count = index.shape[1] // form.tokens
        pages = torch.arange(1, count + 1, dtype=torch.int32, device=key.device)
        pool = key.new_zeros(count + 1, heads, form.nbytes, dtype=torch.uint8)

        def pack() -> Tensor:
            page_pack(*states, index, pages, form, self.spec, pool)
            return pool[1:]

        return pack

    def _class_codes(self, key: Tensor, value: Tensor, piece: Piece) -> Call:
        work = prepared(key, value, self.spec, piece)

        def pack() -> Tensor:
            pack_codes(work)
            return work.records.data

        return pack

    def whole(self, key: Tensor, value: Tensor, piece: Piece) -> Call:
        """Pack classes and levels, without checks on the host, so that graphs can capture it."""

        def pack() -> Tensor:
            with unchecked():
                return class_pack(key, value, self.spec, piece).records.data

        return pack

    def by_torch(self, key: Tensor, value: Tensor) -> Call:
        """Pack classes without a kernel; this synchronises, so no graph can capture it."""
        return lambda: self._quantized(key, value).laid_out(class_layout).records.data

    def _quantized(self, key: Tensor, value: Tensor) -> PackedPair:
        return PackedPair.pack(key, value, self.spec, all_tokens(key))

    def expected(self, key: Tensor, value: Tensor) -> Tensor:
        """Bytes that torch writes; for classes, by the kernels' levels."""
        if self.classes:
            return self._by_own_levels(key, value)
        pair = self._quantized(key, value)
        if self.spans:
            return pair.laid_out(span_layout).records.data
        records = to_group_records(pair.key, pair.value, self._form(key))
        return records.transpose(1, 2).flatten(0, 1) if self.paged else records

    def _by_own_levels(self, key: Tensor, value: Tensor) -> Tensor:
        work = prepared(key, value, self.spec, all_tokens(key))
        pair = PackedPair(
            work.key_levels.packed(work.key, self.spec.key),
            work.value_levels.packed(work.value, self.spec.value),
        )
        return pair.laid_out(class_layout).records.data

    def _form(self, key: Tensor) -> GroupFormat:
        both = (("key", self.spec.key), ("value", self.spec.value))
        operands = (operand_of(spec, key.shape[3], name) for name, spec in both)
        return GroupFormat(key.shape[3], *operands)


def all_tokens(x: Tensor) -> Piece:
    """Every token of every sequence, a span each."""
    batch, _, tokens, _ = x.shape
    offsets = torch.tensor([[0, tokens]], device=x.device).expand(batch, -1).contiguous()
    index = torch.arange(tokens, device=x.device).expand(batch, -1).contiguous()
    spans = BlockTable(offsets)
    take = Move(index, spans.lengths)
    return Piece(take, spans, take)


def _inner(mapping: str) -> KVSpec:
    return KVSpec(TensorSpec(2, "channels", 32, mapping), TensorSpec(2, "tokens", 32, mapping))


PACKINGS = (
    *(Packing(f"{bits} bit", KVSpec(TensorSpec(bits), TensorSpec(bits))) for bits in (1, 2, 4)),
    Packing("kivi-2", KVSpec(TensorSpec(2, "tokens", 32), TensorSpec(2, "channels", 32))),
    Packing("kivi-2 in pages", served_spec(2), paged=True),
    Packing(SYMMETRIC, _inner("symmetric")),
    Packing(HYBRID, _inner("hybrid")),
    Packing("transform coded, 1 bit", KVSpec(*[TensorSpec(classes=COEFFICIENTS)] * 2)),
    Packing("duotone-whole", duotone.scheme("duotone-whole", bits=1).visual),
)


def packing_rows(
    clock: Clock,
    deadline: Deadline,
    repeats: int,
    progress: Callable[[str, int, int], None],
    shapes: Sequence[Shape] = SHAPES,
) -> dict[str, Any]:
    """{"rows": ..., "stopped": reason for missing shapes, or None}.

    Errors: ValueError where a kernel differs from torch.
    """
    for packing in PACKINGS:
        check(packing, clock.device)
    rows: list[dict] = []
    stopped = None
    for done, shape in enumerate(shapes):
        progress(f"packing, {shape}", done, len(shapes))
        if deadline.passed:
            stopped = f"the time was over before {shape} (--minutes)"
            break
        clock.release()
        rows += _shape_rows(clock, shape, repeats)
    return {"status": "ok", "rows": rows, "stopped": stopped}


def check(packing: Packing, device: torch.device) -> None:
    """Raise ValueError if the kernel's bytes are not torch's."""
    key, value = states(CHECKED, device)
    made, expected = packing.call(key, value, all_tokens(key))(), packing.expected(key, value)
    same = made.shape == expected.shape
    different = float((made != expected).float().mean()) if same else 1.0
    if different > (NEAR_TIES if packing.name == HYBRID else 0):
        raise ValueError(
            f"the packing kernel of {packing.name} must write what torch does; "
            f"{different:.2%} of the bytes differ: do not trust its times"
        )


def states(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """K and V in bf16."""
    size = (2, shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
    key, value = torch.randn(size, device=device, dtype=torch.bfloat16)
    return key, value


def _shape_rows(clock: Clock, shape: Shape, repeats: int) -> list[dict[str, Any]]:
    first = states(shape, clock.device)
    piece = all_tokens(first[0])
    nbytes = sum(x.nbytes for x in first)
    copies = rotated_count(3 * nbytes, clock.free_bytes())
    pairs = [first, *(tuple(x.clone() for x in first) for _ in range(copies - 1))]
    copy_us = _timed(clock, [_copy(*pair) for pair in pairs], repeats)
    rows = [_row(shape, "copy", nbytes, nbytes, copy_us, copy_us)]
    for packing in PACKINGS:
        calls = [packing.call(*pair, piece) for pair in pairs]
        written = calls[0]().nbytes
        us = _timed(clock, calls, repeats)
        rows.append(_row(shape, packing.name, nbytes, written, us, copy_us))
        if packing.classes:
            us = _timed(clock, [packing.whole(*pair, piece) for pair in pairs], repeats)
            rows.append(_row(shape, f"{packing.name}, with levels", nbytes, written, us, copy_us))
            call = packing.by_torch(*first)
            call()
            us = dict.fromkeys(METHODS) | {"clean": clean_us(call, clock, EAGER_REPEATS)}
            rows.append(_row(shape, f"{packing.name}, by torch", nbytes, written, us, copy_us))
    return rows


def _copy(key: Tensor, value: Tensor) -> Call:
    """Copy by a kernel: graphs run plain copies on the copy engine, at two thirds of the speed."""
    targets = torch.empty_like(key), torch.empty_like(value)

    def copy() -> Tensor:
        torch.neg(key, out=targets[0])
        return torch.neg(value, out=targets[1])

    return copy


def _timed(clock: Clock, calls: Sequence[Call], repeats: int) -> dict[str, float | None]:
    for call in calls:
        call()
    return measure(calls, clock, repeats)


def _row(
    shape: Shape, name: str, read: int, written: int, us: dict, copy_us: dict
) -> dict[str, Any]:
    over_copy = {method: us[method] and us[method] / copy_us[method] for method in METHODS}
    return {
        "shape": asdict(shape),
        "row": name,
        "read_bytes": read,
        "written_bytes": written,
        "us": us,
        "over_copy": over_copy,
    }
