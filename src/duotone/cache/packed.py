"""One packed tensor (K or V) of one layer: codes in canonical packing, scales, zero-points."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.ragged import Lengths, Move, valid_mask
from duotone.quant import TensorSpec, pack, quantize, unpack
from duotone.quant.affine import Quantized
from duotone.quant.classes import (
    CLASS_BITS,
    class_order,
    coded_channels,
    pack_classes,
    unpack_classes,
)
from duotone.quant.rotation import rotate

# What has a row per token in every layout; parameters have one only along channels.
TOKEN_PARTS = ("codes", "negative")
Codes = UInt8[Tensor, "batch kv_heads tokens bytes"]
Params = Float[Tensor, "batch kv_heads rows columns"]


@dataclass(frozen=True)
class PackedTensor:
    """K or V of the packed tokens of one layer.

    codes: [batch, kv_heads, tokens, head_dim * bits / 8], big-endian in each byte.
    scale, zero_point: one row per block along tokens and along the span, with head_dim or 1
        columns; one row per token along channels, with a column per channel group.
    negative: packed sign plane of sign-and-magnitude mappings, [.., tokens, head_dim / 8].
    symmetric: packed mode bits of a hybrid, one per group.
    classes: packed class numbers of the channels, one row per block. Codes, scale and zero_point
        are then sorted by class (`quant.classes`), and scale has the coded channels only.
    blocks: which tokens share a row of parameters.
    codes are None where a layer reads another layer's (`with_codes` brings them in).
    """

    spec: TensorSpec
    head_dim: int
    dtype: torch.dtype
    blocks: BlockTable
    codes: Codes | None
    scale: Params
    zero_point: Float[Tensor, "batch kv_heads rows offsets"] | None = None
    negative: UInt8[Tensor, "batch kv_heads tokens sign_bytes"] | None = None
    symmetric: UInt8[Tensor, "batch kv_heads rows mode_bytes"] | None = None
    classes: UInt8[Tensor, "batch kv_heads rows class_bytes"] | None = None

    @property
    def tokens(self) -> int:
        """Width of the token axis (the longest sequence)."""
        rows = self.codes if self.codes is not None else self.scale if self.per_token else None
        return int(self.blocks.lengths.max()) if rows is None else rows.shape[2]

    def with_codes(self, source: PackedTensor) -> PackedTensor:
        """These scales and zero-points on another layer's codes, which are not copied."""
        return replace(self, codes=source.codes)

    def without_codes(self) -> PackedTensor:
        """Scales and zero-points alone."""
        return replace(self, codes=None)

    @property
    def per_token(self) -> bool:
        """Parameters have a row per token rather than a row per block."""
        return self.spec.along == "channels"

    @property
    def codes_bytes(self) -> int:
        """Bytes of codes and signs."""
        return sum(t.nbytes for t in (self.codes, self.negative) if t is not None)

    @property
    def params_bytes(self) -> int:
        """Bytes of scales, zero-points and mode bits."""
        stored = (self.scale, self.zero_point, self.symmetric, self.classes)
        return sum(t.nbytes for t in stored if t is not None)

    def unpacked(self) -> UInt8[Tensor, "batch kv_heads tokens head_dim"]:
        """The codes, one per byte (magnitudes, for sign-and-magnitude mappings)."""
        if self.classes is not None:
            return unpack_classes(self.codes, self.spec, self.head_dim)
        return unpack(self.codes, self.spec.bits, self.head_dim)

    def signed_codes(self, dtype: torch.dtype) -> Tensor:
        """The codes as numbers, signs applied: what scale and zero_point belong to."""
        codes = self.unpacked().to(dtype)
        if self.negative is None:
            return codes
        return torch.where(unpack(self.negative, 1, self.head_dim).bool(), -codes, codes)

    @property
    def full_scale(self) -> Params:
        """The scale of every channel: 0 where a class has no codes."""
        missing = self.head_dim - self.scale.shape[-1] if self.classes is not None else 0
        return F.pad(self.scale, (0, missing)) if missing else self.scale

    @property
    def channel_order(self) -> Int[Tensor, "batch kv_heads rows head_dim"] | None:
        """Which channel each place of codes and parameters belongs to; None: as they stand."""
        if self.classes is None:
            return None
        return class_order(unpack(self.classes, CLASS_BITS, self.head_dim))

    def dequantize(self) -> Float[Tensor, "batch kv_heads tokens head_dim"]:
        """x_hat in the model's dtype; tokens past a sequence's length hold anything."""
        value = self.signed_codes(torch.float32) * self._per_element(self.full_scale.float())
        if self.zero_point is not None:
            value = value + self._per_element(self.zero_point.float())
        order = self.channel_order
        if order is not None:
            value = torch.empty_like(value).scatter_(-1, self._per_element(order), value)
        return rotate(value, self.spec.transform).to(self.dtype)

    def _per_element(self, parameter: Tensor) -> Tensor:
        if self.per_token:
            size = min(self.spec.group or self.head_dim, self.head_dim)
            return parameter.repeat_interleave(size, -1)[..., : self.head_dim]
        block = Move(self.blocks.block_of_token(self.tokens), self.blocks.lengths)
        return block.apply(parameter)

    def append(self, other: PackedTensor, move: Move) -> PackedTensor:
        """Join the tokens of `other` behind ours, per sequence; `move` joins the token axes."""
        blocks, row_move = self.blocks.append(other.blocks)
        joined = {}
        for name in self.tensor_names():
            both = torch.cat([getattr(self, name), getattr(other, name)], 2)
            joined[name] = (move if self._has_token_axis(name) else row_move).apply(both)
        return replace(self, blocks=blocks, **joined)

    def truncate(self, lengths: Lengths) -> PackedTensor:
        """Keep the first `lengths[b]` tokens; their codes and ranges stay as they are."""
        return replace(self, blocks=self.blocks.truncate(lengths))._trimmed()

    def rows(self, index: Tensor) -> PackedTensor:
        """Pick sequences (beam search, batch select and repeat)."""
        picked = {name: getattr(self, name)[index] for name in self.tensor_names()}
        return replace(self, blocks=self.blocks.rows(index), **picked)._trimmed()

    def _trimmed(self) -> PackedTensor:
        """Cut the token axis to the longest sequence, which is what the block table spans."""
        keep = int(self.blocks.lengths.max())
        if keep == self.tokens:
            return self
        names = [name for name in self.tensor_names() if self._has_token_axis(name)]
        cut = {name: getattr(self, name)[:, :, :keep].contiguous() for name in names}
        return replace(self, **cut)

    def tensor_names(self) -> list[str]:
        """The tensor fields that this spec uses."""
        return [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]

    def _has_token_axis(self, name: str) -> bool:
        return self.per_token or name in TOKEN_PARTS


def pack_tensor(
    x: Float[Tensor, "batch kv_heads tokens head_dim"],
    spec: TensorSpec,
    spans: BlockTable,
    read_power: Float[Tensor, "kv_heads head_dim"] | None = None,
) -> PackedTensor:
    """Quantize and pack the tokens of x, each span of `spans` with ranges of its own.

    Tokens past a sequence's length are padding and enter no statistic.
    read_power: how strongly the model reads each channel, for `spec.read_power`.
    """
    dtype = x.dtype
    if spec.transform is not None:
        x = rotate(x.to(torch.promote_types(dtype, torch.float32)), spec.transform)
    if spec.along == "channels":
        mask = valid_mask(spans.lengths, x.shape[2])[:, None].expand(x.shape[:3])
        blocks, parts = spans, _packed_parts(quantize(x, spec, mask))
    else:
        blocks, parts = _pack_blocks(x, spec, spans, read_power)
    return PackedTensor(spec=spec, head_dim=x.shape[-1], dtype=dtype, blocks=blocks, **parts)


def _pack_blocks(
    x: Tensor, spec: TensorSpec, spans: BlockTable, read_power: Tensor | None
) -> tuple[BlockTable, dict[str, Tensor]]:
    """Quantize block by block; codes come back in token order, parameters one row per block."""
    blocks = spans.split(spec.group)
    slots = blocks.to_slots(x)
    mask = blocks.mask[:, None].expand(slots.shape[:4])
    power = None if read_power is None else read_power.to(x.device)[:, None]
    parts = _packed_parts(quantize(slots, spec.replace(group=None), mask, power))
    return blocks, {
        name: blocks.to_tokens(part) if name in TOKEN_PARTS else part.squeeze(3)
        for name, part in parts.items()
    }


def _packed_parts(q: Quantized) -> dict[str, Tensor]:
    """The tensors of a PackedTensor, those that this spec uses."""
    if q.classes is not None:
        return _sorted_by_class(q, q.classes)
    parts = {"codes": pack(q.codes, q.spec.bits), "scale": q.scale, "zero_point": q.zero_point}
    for name in ("negative", "symmetric"):
        bits = getattr(q, name)
        parts[name] = None if bits is None else pack(bits.byte(), 1)
    return {name: part for name, part in parts.items() if part is not None}


def _sorted_by_class(q: Quantized, numbers: Tensor) -> dict[str, Tensor]:
    order = class_order(numbers)
    coded = coded_channels(q.spec, numbers.shape[-1])
    return {
        "codes": pack_classes(q.codes.gather(-1, order.expand_as(q.codes)), q.spec),
        # A copy: a view would keep the scales of channels without codes in memory.
        "scale": q.scale.gather(-1, order)[..., :coded].contiguous(),
        "zero_point": q.zero_point.gather(-1, order),
        "classes": pack(numbers, CLASS_BITS),
    }
