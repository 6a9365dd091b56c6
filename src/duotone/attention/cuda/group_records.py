"""Streams in group records: laid out, taken apart again, and with room for what joins them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from duotone.attention.cuda.group_layout import (
    TILE,
    GroupFormat,
    Operand,
    group_order,
    operand_of,
    operand_reason,
    scales_fit,
    sign_bits,
    to_group_records,
)
from duotone.attention.cuda.group_pack import group_pack, pack_reason
from duotone.attention.cuda.layout import untile_codes
from duotone.attention.cuda.runtime import has_kernels
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.ledger import Piece
from duotone.cache.packed import pack_groups
from duotone.cache.ragged import Lengths, Move, concatenate
from duotone.quant import KVSpec, TensorSpec, pack
from duotone.quant.checks import unchecked
from duotone.quant.slots import fill_slots, has_slot, slot_bytes

Both = tuple[PackedTensor, PackedTensor]
Tiles = UInt8[Tensor, "batch kv_heads tiles bytes"]


@dataclass(frozen=True)
class GroupRecords:
    """K and V of a stream with all their parameters.

    data: [batch, kv_heads, records, format.nbytes]; token t of a sequence is in tile t / 32.
    """

    format: GroupFormat
    data: UInt8[Tensor, "batch kv_heads records bytes"]

    @property
    def shape(self) -> torch.Size:
        """(batch, kv_heads)."""
        return self.data.shape[:2]

    @property
    def nbytes(self) -> int:
        """Bytes, filling included."""
        return self.data.nbytes

    @property
    def params_bytes(self) -> int:
        """Bytes of scales, zero-points and signs."""
        return self.data.nbytes // self.format.tile_bytes * sum(self.format.part_bytes[2:])

    @property
    def tiles(self) -> Tiles:
        """The same bytes, tile by tile: a view."""
        return self.data.view(*self.shape, -1, self.format.tile_bytes)

    def rows(self, index: Tensor) -> GroupRecords:
        """Pick sequences."""
        return replace(self, data=self.data[index])

    def left(self, key: PackedTensor, value: PackedTensor) -> Both:
        """Their block tables."""
        return key.without_parts(), value.without_parts()

    def canonical(self, key: PackedTensor, value: PackedTensor) -> Both:
        """K and V in canonical order."""
        form, parts = self.format, self.tiles.split(self.format.part_bytes, -1)
        return (
            _taken_apart(key, form.key, form.channels, parts[0], parts[2], value=False),
            _taken_apart(value, form.value, form.channels, parts[1], parts[3], value=True),
        )

    def append(self, other: GroupRecords, lengths: Lengths, more: Lengths) -> GroupRecords | None:
        """More tiles behind whole ones: copies. None behind a tile that is not full."""
        if self.format != other.format or bool((lengths % TILE).any()):
            return None
        own, new = self.tiles, other.tiles
        join = concatenate(lengths // TILE, -(-more // TILE), own.shape[2])
        joined = join.apply(torch.cat([own, new], 2))
        return _filled(self.format, joined)

    def fill_at_random(self, first: int) -> None:
        """Overwrite the tiles from token `first` on with some stream, for benchmarks."""
        codes = sum(self.format.part_bytes[:2])
        rest = self.tiles[:, :, first // TILE :]
        rest[..., :codes].random_(0, 256)
        rest[..., codes:].view(torch.float16).uniform_(0.1, 0.2)

    def widened(self, tokens: int) -> GroupRecords:
        """The same tokens in a buffer for `tokens`."""
        tiles = self.tiles.new_zeros(*self.shape, -(-tokens // TILE), self.format.tile_bytes)
        kept = min(tiles.shape[2], self.tiles.shape[2])
        tiles[:, :, :kept] = self.tiles[:, :, :kept]
        return _filled(self.format, tiles)

    def write(
        self,
        states: tuple[Tensor, Tensor],
        leaving: Move,
        full: Tensor,
        where: Lengths,
        key_norm: Tensor | None,
        spec: KVSpec,
    ) -> None:
        """Quantize a group of dense K and V of the sequences that are `full`, from token `where`.

        leaving: which tokens they are. Shapes are fixed and nothing asks the host.
        """
        count = leaving.tokens // TILE
        if has_kernels(self.data.device) and pack_reason(spec) is None:
            tiles, first = full.long() * count, where // TILE
            given = (leaving.index, tiles, first, self.format, spec, self.data, key_norm)
            group_pack(*states, *given, decoding=True)
            return
        key, value = (leaving.apply(x) for x in states)
        if key_norm is not None:
            key = (key / key_norm[:, :, None]).to(key.dtype)
        new = to_group_records(_group(key, spec.key), _group(value, spec.value), self.format)
        tiles = new.view(*self.shape, -1, self.format.tile_bytes)[:, :, :count]
        # A full sequence that finds no room must fail on the device, not overwrite.
        room = where.clamp_max((self.tiles.shape[2] - count) * TILE)
        first = torch.where(full, where, room) // TILE
        at = first[:, None] + torch.arange(count, device=first.device)
        index = at[:, None, :, None].expand(tiles.shape)
        kept = self.tiles
        kept.scatter_(
            2, index, torch.where(full[:, None, None, None], tiles, kept.gather(2, index))
        )


class GroupLayout:
    """Lays streams out in group records."""

    def __call__(self, key: PackedTensor, value: PackedTensor) -> GroupRecords | None:
        """The records of K and V, or None where the kernel cannot read them."""
        form = _format((key.spec, value.spec), (key.head_dim, value.head_dim))
        both = (key, value)
        if form is None or not all(_is_whole(x) and scales_fit(x) for x in both):
            return None
        return GroupRecords(form, to_group_records(key, value, form))

    def pack(
        self, key: Tensor, value: Tensor, spec: KVSpec, piece: Piece
    ) -> tuple[PackedTensor, PackedTensor, GroupRecords] | None:
        """Quantize dense K and V straight into records; None where no kernel does that."""
        form = _format((spec.key, spec.value), (key.shape[3], value.shape[3]))
        if form is None or not has_kernels(key.device) or pack_reason(spec) is not None:
            return None
        multiple = max(TILE, spec.flush_tokens)
        take, lengths = piece.take, piece.take.lengths
        if take.tokens % multiple or bool((lengths % multiple).any()):
            return None
        tiles, overflow = lengths // TILE, lengths.new_zeros(1, dtype=torch.int32)
        size = (len(lengths), key.shape[1], -(-take.tokens // form.tokens), form.nbytes)
        data = torch.zeros(size, dtype=torch.uint8, device=key.device)
        where = torch.zeros_like(tiles)
        group_pack(
            key,
            value,
            take.index,
            tiles,
            where,
            form,
            spec,
            data,
            overflow=overflow,
            decoding=piece.decoding,
        )
        if int(overflow):
            return None
        tensors = (_bare(x, s, piece.spans) for x, s in ((key, spec.key), (value, spec.value)))
        return (*tensors, GroupRecords(form, data))

    def empty(
        self, spec: KVSpec, shape: tuple[int, int], channels: tuple[int, int], device: torch.device
    ) -> GroupRecords | None:
        """A stream without tokens. shape: (batch, kv_heads). channels: of K and of V."""
        form = _format((spec.key, spec.value), channels)
        if form is None:
            return None
        data = torch.empty(*shape, 0, form.nbytes, dtype=torch.uint8, device=device)
        return GroupRecords(form, data)


def stream_reason(key: TensorSpec, value: TensorSpec) -> str | None:
    """Why streams of these specs cannot be in group records, or None."""
    if value.transform is not None:
        return f"the CUDA kernels do not rotate outputs back; value is {value}"
    return operand_reason(key, "key") or operand_reason(value, "value")


def _format(specs: tuple[TensorSpec, TensorSpec], channels: tuple[int, int]) -> GroupFormat | None:
    operands = [
        operand_of(spec, n, which)
        for spec, n, which in zip(specs, channels, ("key", "value"), strict=True)
    ]
    if channels[0] != channels[1] or any(isinstance(x, str) for x in operands):
        return None
    return GroupFormat(channels[0], *operands)


def _is_whole(x: PackedTensor) -> bool:
    """Groups along tokens are whole, but for the last one of a sequence."""
    if x.per_token:
        return True
    offsets = x.blocks.offsets
    edges = torch.arange(offsets.shape[1], device=offsets.device) * x.spec.group
    return bool((offsets == torch.minimum(edges, x.blocks.lengths[:, None])).all())


def _bare(x: Tensor, spec: TensorSpec, spans: BlockTable) -> PackedTensor:
    """A packed tensor whose parts are in records."""
    blocks = spans if spec.along == "channels" else spans.split(spec.group)
    return PackedTensor(spec, x.shape[3], x.dtype, blocks, None, None)


def _filled(form: GroupFormat, tiles: Tiles) -> GroupRecords:
    """Whole records of some tiles."""
    missing = -tiles.shape[2] % form.tiles
    tiles = torch.nn.functional.pad(tiles, (0, 0, 0, missing))
    return GroupRecords(form, tiles.unflatten(2, (-1, form.tiles)).flatten(3).contiguous())


def _group(x: Tensor, spec: TensorSpec) -> PackedTensor:
    """Whole groups of all sequences, packed in canonical order."""
    with unchecked():
        parts = pack_groups(x, spec, decoding=True)
    size = x.shape[2] if spec.along == "channels" else spec.group
    edges = torch.arange(0, x.shape[2] + 1, size, device=x.device)
    table = BlockTable(edges.expand(x.shape[0], -1))
    return PackedTensor(spec, x.shape[3], x.dtype, table, **{"codes": None, **parts})


def _taken_apart(
    x: PackedTensor, form: Operand, channels: int, codes: Tiles, params: Tiles, value: bool
) -> PackedTensor:
    """K or V with its tensors in canonical order."""
    rows, k = (channels, TILE) if value else (TILE, channels)
    order = group_order(rows, k, form.bits, value)
    plain = untile_codes(codes, order, form.bits, TILE)[:, :, : x.tokens, : x.head_dim]
    groups = form.groups(rows, k) // (rows if form.along_k else k)
    parts = {"codes": pack(plain.contiguous(), form.bits)}
    if form.signs:
        parts |= _signed_params(x, form, params, (rows, groups), value)
    else:
        scale, zero = _plain_params(form, params, (rows, groups) if form.along_k else (groups, k))
        parts["scale"] = _by_tokens(x, scale, value)
        parts["zero_point"] = _by_tokens(x, zero, value)
    return replace(x, **parts)


def _plain_params(
    form: Operand, params: Tiles, size: tuple[int, int]
) -> Float[Tensor, "2 batch heads tiles rows columns"]:
    """Scales and zero-points by operand: rows by groups, or row groups by k."""
    numbers = params.contiguous().view(torch.float16)
    if form.along_k:  # [row tile][group][g]{2 scales, 2 zero-points}
        split = numbers.unflatten(-1, (size[0] // 16, size[1], 8, 2, 2))
        return split.permute(6, 0, 1, 2, 3, 7, 5, 4).flatten(4, 6)
    split = numbers.unflatten(-1, (size[0], size[1] // 16, 4, 2, 2, 2))
    return split.permute(6, 0, 1, 2, 3, 4, 7, 5, 8).flatten(-4)


def _by_tokens(x: PackedTensor, parameter: Tensor, value: bool) -> Tensor:
    """A parameter of tiles as `PackedTensor` has it, one row per token or per block."""
    tiled = parameter.transpose(4, 3) if value else parameter
    if x.per_token:
        columns = -(-x.head_dim // (x.spec.group or x.head_dim))
        return tiled.flatten(2, 3)[:, :, : x.tokens, :columns].contiguous()
    rows = tiled[:, :, :: x.spec.group // TILE, 0, : x.head_dim]
    # The table may end in blocks without tokens.
    return _resized(rows, x.blocks.blocks)


def _resized(x: Tensor, rows: int) -> Tensor:
    """`rows` rows, filled up with zeros."""
    fitting = x.new_zeros(*x.shape[:2], rows, *x.shape[3:])
    kept = min(rows, x.shape[2])
    fitting[:, :, :kept] = x[:, :, :kept]
    return fitting


def _signed_params(
    x: PackedTensor, form: Operand, params: Tiles, size: tuple[int, int], value: bool
) -> dict[str, Tensor]:
    """Scales and what a group's word says: its signs, or its zero-point."""
    rows, groups = size
    count = rows * groups
    parts = params.split([2 * count, 4 * count], -1)
    flagged, words = (
        part.contiguous()
        .view(dtype)
        .unflatten(-1, (rows // 16, groups, 8, 2))
        .permute(0, 1, 2, 3, 6, 5, 4)
        .flatten(3, 5)
        for part, dtype in zip(parts, (torch.float16, torch.int32), strict=True)
    )
    symmetric = flagged.signbit()
    signs = (words.long()[..., None] >> sign_bits(words.device)) & 1
    signs = _elements(x, (signs * symmetric[..., None]).byte(), value)
    found = {"scale": _by_tokens(x, flagged.abs(), value)}
    if not has_slot(x.spec):
        plane = signs if x.per_token else signs.transpose(-1, -2)
        flat = plane.flatten(-2) if x.per_token else plane.flatten(2, 3)
        return found | {"negative": pack(flat[:, :, : x.tokens, : x.head_dim].contiguous(), 1)}
    modes = _by_tokens(x, symmetric, value)
    zero = _by_tokens(x, words.to(torch.int16).view(torch.float16), value)
    width = slot_bytes(x.spec, x.head_dim)
    return found | {
        "slot": fill_slots(zero.masked_fill(modes, 0), signs.bool(), modes, width),
        "symmetric": pack(modes.byte(), 1),
    }


def _elements(x: PackedTensor, signs: Tensor, value: bool) -> Tensor:
    """Signs of tiles [.., rows, groups, 32] group by group, as `_by_tokens` has the groups."""
    parts = [_by_tokens(x, part, value) for part in signs.unbind(-1)]
    return torch.stack(parts, -1)
