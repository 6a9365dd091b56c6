"""Streams in group records: laid out, taken apart again, and with room for what joins them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import UInt8
from torch import Tensor

from duotone.attention.cuda.group_canonical import Tiles, taken_apart
from duotone.attention.cuda.group_format import TILE, GroupFormat, operand_of, operand_reason
from duotone.attention.cuda.group_layout import scales_fit, to_group_records
from duotone.attention.cuda.group_pack import group_pack, packs
from duotone.attention.cuda.runtime import has_kernels
from duotone.attention.cuda.window_append import appends, window_move
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.ledger import Piece
from duotone.cache.packed import pack_groups
from duotone.cache.pair import PackedPair
from duotone.cache.ragged import Lengths, Move, concatenate
from duotone.cache.static import move_tokens
from duotone.quant import KVSpec, TensorSpec
from duotone.quant.checks import unchecked

MAX_CHANNELS = 256
Both = tuple[PackedTensor, PackedTensor]


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
            taken_apart(key, form.key, form.channels, parts[0], parts[2], value=False),
            taken_apart(value, form.value, form.channels, parts[1], parts[3], value=True),
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
        if packs(states, self.format, spec):
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

    def close_gap(
        self, states: tuple[Tensor, Tensor], source: Tensor, target: Tensor, full: Tensor
    ) -> None:
        """Move dense tokens to the slots that a group has left."""
        if has_kernels(self.data.device) and appends(states, states):
            window_move(states, source, target, full)
            return
        for x in states:
            move_tokens(x, source, target, full)


class GroupLayout:
    """Lays streams out in group records."""

    def __call__(self, key: PackedTensor, value: PackedTensor) -> GroupRecords | None:
        """The records of K and V, or None where the kernel cannot read them."""
        form = _format((key.spec, value.spec), (key.head_dim, value.head_dim))
        both = (key, value)
        if form is None or not all(x.per_token or x.blocks.is_whole(x.spec.group) for x in both):
            return None
        operands = (form.key, form.value)
        if not all(scales_fit(x, at) for x, at in zip(both, operands, strict=True)):
            return None
        return GroupRecords(form, to_group_records(key, value, form))

    def pack(self, key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair | None:
        """Quantize dense K and V straight into records; None where no kernel does that."""
        form = _format((spec.key, spec.value), (key.shape[3], value.shape[3]))
        if form is None or not packs((key, value), form, spec):
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
        return PackedPair(*tensors, GroupRecords(form, data))

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
    if key.along == value.along == "channels":
        # Tokens leave the window one by one, tiles are whole.
        return f"group records need groups along tokens in K or V; got {key} and {value}"
    return operand_reason(key, "key") or operand_reason(value, "value")


def _format(specs: tuple[TensorSpec, TensorSpec], channels: tuple[int, int]) -> GroupFormat | None:
    operands = [
        operand_of(spec, n, which)
        for spec, n, which in zip(specs, channels, ("key", "value"), strict=True)
    ]
    if channels[0] != channels[1] or any(isinstance(x, str) for x in operands):
        return None
    if stream_reason(*specs) is not None or channels[0] > MAX_CHANNELS:
        return None
    return GroupFormat(channels[0], *operands)


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
    table = BlockTable.uniform(x.shape[0], x.shape[2], size, x.device)
    return PackedTensor(spec, x.shape[3], x.dtype, table, **{"codes": None, **parts})
