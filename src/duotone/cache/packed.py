"""One packed tensor (K or V) of one layer: codes in canonical packing, scales, zero-points."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.ragged import Lengths, Move, owned, valid_mask
from duotone.quant import TensorSpec, pack, quantize, unpack
from duotone.quant.affine import Quantized
from duotone.quant.classes import (
    CLASS_BITS,
    class_counts,
    class_order,
    coded_channels,
    pack_classes,
    unpack_classes,
)
from duotone.quant.codebooks import decoded_levels
from duotone.quant.factors import NORM, divided_blocks, divided_by_norm
from duotone.quant.grouping import group
from duotone.quant.honours import check_packed, check_read
from duotone.quant.rotation import into_basis, out_of_basis
from duotone.quant.slots import (
    fill_slots,
    group_elements,
    has_slot,
    slot_bytes,
    slot_signs,
    slot_zero_points,
)
from duotone.quant.small_floats import MIDDLE, SCALE, from_bytes, lowest_levels, to_bytes

# Tensors with a row per token in every layout; parameters have one only along channels.
TOKEN_PARTS = ("codes", "negative")
Codes = UInt8[Tensor, "batch kv_heads tokens bytes"]
Params = Float[Tensor, "batch kv_heads rows columns"]


@dataclass(frozen=True)
class PackedTensor:
    """K or V of the packed tokens of one layer.

    codes: [batch, kv_heads, tokens, head_dim * bits / 8], big-endian in each byte.
    scale, zero_point: along tokens and along the span one row per block, with head_dim or 1
        columns. Along channels one row per token, with a column per channel group.
        Of `param_dtype` "float8" they are bytes (`quant.small_floats`), with a column more, and
        zero_point is the middle of the levels.
    slot: zero_point or signs of each group of a hybrid, with rows and columns like scale.
        `quant.slots` draws the bits and names the hybrids without slots.
    negative: packed plane of signs of sign-and-magnitude codes without slots,
        [.., tokens, head_dim / 8].
    symmetric: packed mode bits of a hybrid, one per group, row by row.
    factor: numbers by which decoded elements are multiplied (`quant.factors`). One per token, for
        all heads or for each; along channels a row of head_dim per block.
    classes: packed class numbers of the channels, one row per block. Codes, scale and zero_point
        are then sorted by class (`quant.classes`), and scale has the coded channels only.
    blocks: tokens that share a row of parameters.
    codes are None where a layer reads another layer's codes (`with_codes` brings them in). All
    tensors are None where a kernel keeps them in an order of its own (`pair.LaidOut`).
    """

    spec: TensorSpec
    head_dim: int
    dtype: torch.dtype
    blocks: BlockTable
    codes: Codes | None
    scale: Params | UInt8[Tensor, "batch kv_heads rows scale_bytes"] | None
    zero_point: (
        Float[Tensor, "batch kv_heads rows offsets"]
        | UInt8[Tensor, "batch kv_heads rows zero_bytes"]
        | None
    ) = None
    slot: UInt8[Tensor, "batch kv_heads rows columns slot_bytes"] | None = None
    negative: UInt8[Tensor, "batch kv_heads tokens sign_bytes"] | None = None
    symmetric: UInt8[Tensor, "batch kv_heads rows mode_bytes"] | None = None
    classes: UInt8[Tensor, "batch kv_heads rows class_bytes"] | None = None
    factor: Float[Tensor, "batch factor_heads factor_rows factor_columns"] | None = None

    @property
    def tokens(self) -> int:
        """Width of the token axis (the longest sequence)."""
        rows = self.codes if self.codes is not None else self.scale if self.per_token else None
        # Without tensors only the table has the width.
        return self.blocks.tokens if rows is None else rows.shape[2]

    def with_codes(self, source: PackedTensor) -> PackedTensor:
        """Combine these scales and zero-points with another layer's codes, without a copy.

        While a step runs, an earlier layer may have taken its tokens in already; they come after
        ours.
        """
        return replace(self, codes=source.codes[:, :, : self.tokens])

    def without_codes(self) -> PackedTensor:
        """Scales and zero-points alone."""
        return replace(self, codes=None)

    def without_parts(self) -> PackedTensor:
        """Fields of this object without any of its tensors."""
        return replace(self, scale=None, **dict.fromkeys(set(self.tensor_names()) - {"scale"}))

    @property
    def per_token(self) -> bool:
        """True where parameters have a row per token rather than a row per block."""
        return self.spec.along == "channels"

    @property
    def has_bytes(self) -> bool:
        """True where scale and zero_point are rows of bytes (`quant.small_floats`)."""
        return self.spec.param_dtype == "float8"

    @property
    def codes_bytes(self) -> int:
        """Bytes of codes and planes of signs."""
        return sum(t.nbytes for t in (self.codes, self.negative) if t is not None)

    @property
    def params_bytes(self) -> int:
        """Bytes of scales, zero-points, slots, mode bits, class numbers and factors."""
        stored = (self.scale, self.zero_point, self.slot, self.symmetric, self.classes, self.factor)
        return sum(t.nbytes for t in stored if t is not None)

    def unpacked(self) -> UInt8[Tensor, "batch kv_heads tokens head_dim"]:
        """Unpack the codes, one per byte (magnitudes, for sign-and-magnitude mappings)."""
        if self.classes is not None:
            return unpack_classes(self.codes, self.spec, self.head_dim)
        return unpack(self.codes, self.spec.bits, self.head_dim)

    def signed_codes(self, dtype: torch.dtype) -> Tensor:
        """Codes as numbers, signs applied: the operand of scale and zero_point."""
        codes, signs = self.unpacked(), self.signs()
        codes = decoded_levels(codes, self.spec.codebook, self.spec.bits, dtype)
        return codes if signs is None else torch.where(signs, -codes, codes)

    def signs(self) -> Bool[Tensor, "batch kv_heads tokens head_dim"] | None:
        """True at negative codes; None where all codes count upwards from a zero_point."""
        if self.slot is None:
            plane = self.negative
            return None if plane is None else unpack(plane, 1, self.head_dim).bool()
        signs = slot_signs(self.slot, self.modes, group_elements(self.spec, self.head_dim))
        if self.per_token:
            return signs.flatten(-2)[..., : self.head_dim]
        return self.blocks.to_tokens(signs.transpose(-1, -2)[:, :, :, : self.blocks.longest])

    @property
    def offset(self) -> Params | None:
        """Addend to codes * scale: the zero_points, 0 in symmetric groups; None: nothing."""
        if self.slot is None:
            return self._lowest_levels() if self.has_bytes else self.zero_point
        return slot_zero_points(self.slot, self.modes, self.scale.dtype)

    def _lowest_levels(self) -> Params:
        """Zero-points in fp32 from the middles of the levels."""
        scale, middle = self.scales, from_bytes(self.zero_point, MIDDLE)
        top = 2**self.spec.bits - 1
        if self.classes is not None:
            counts = class_counts(self.spec, self.head_dim)
            top = torch.cat([scale.new_full((n,), 2**bits - 1) for bits, n in counts])
        return lowest_levels(scale, middle, top)

    @property
    def modes(self) -> Bool[Tensor, "batch kv_heads rows columns"]:
        """True at groups of a hybrid that are sign and magnitude."""
        return unpack(self.symmetric, 1, self.scale.shape[-1]).bool()

    @property
    def scales(self) -> Params:
        """Scales as numbers: of the channels that have codes."""
        return from_bytes(self.scale, SCALE) if self.has_bytes else self.scale

    @property
    def full_scale(self) -> Params:
        """Scale of every channel: 0 where a class has no codes."""
        scales = self.scales
        missing = self.head_dim - scales.shape[-1] if self.classes is not None else 0
        return F.pad(scales, (0, missing)) if missing else scales

    @property
    def channel_order(self) -> Int[Tensor, "batch kv_heads rows head_dim"] | None:
        """Channel of each slot of codes and parameters; None: in the order of channels."""
        if self.classes is None:
            return None
        return class_order(unpack(self.classes, CLASS_BITS, self.head_dim))

    def dequantize(self) -> Float[Tensor, "batch kv_heads tokens head_dim"]:
        """x_hat in the model's dtype; tokens past a sequence's length hold anything."""
        check_read(self.spec)
        value = self.multiplied(self.without_factors(torch.float32))
        return out_of_basis(value, self.spec.transform).to(self.dtype)

    def without_factors(self, dtype: torch.dtype) -> Tensor:
        """Decode codes, scales and zero-points, in the basis of quantization."""
        value = self.signed_codes(dtype) * self._per_element(self.full_scale.to(dtype))
        offset = self.offset
        if offset is not None:
            value = value + self._per_element(offset.to(dtype))
        order = self.channel_order
        if order is not None:
            value = torch.empty_like(value).scatter_(-1, self._per_element(order), value)
        return value

    def multiplied(self, value: Tensor) -> Tensor:
        """Multiply elements [batch, kv_heads, tokens, head_dim] by their factors."""
        if self.factor is None:
            return value
        factor = self._of_blocks(self.factor) if self.per_token else self.factor
        return value * factor.to(value.dtype)

    def _per_element(self, parameter: Tensor) -> Tensor:
        if self.per_token:
            size = min(self.spec.group or self.head_dim, self.head_dim)
            return parameter.repeat_interleave(size, -1)[..., : self.head_dim]
        return self._of_blocks(parameter)

    def _of_blocks(self, parameter: Tensor) -> Tensor:
        """Repeat a row per block to one per token."""
        block = Move(self.blocks.block_of_token(self.tokens), self.blocks.lengths)
        return block.apply(parameter)

    def append(self, other: PackedTensor, move: Move) -> PackedTensor:
        """Join the tokens of `other` after ours, per sequence; `move` joins the token axes."""
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
        """Cut the token axis to the longest sequence, which the block table spans."""
        keep = int(self.blocks.lengths.max())
        if keep == self.tokens:
            return self
        names = [name for name in self.tensor_names() if self._has_token_axis(name)]
        cut = {name: owned(getattr(self, name)[:, :, :keep]) for name in names}
        return replace(self, **cut)

    def tensor_names(self) -> list[str]:
        """Names of the tensor fields that are not None."""
        return [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]

    def _has_token_axis(self, name: str) -> bool:
        return has_token_axis(self.spec, name)


def has_token_axis(spec: TensorSpec, name: str) -> bool:
    """True for a part with a row per token, False for one with a row per block."""
    along_channels = spec.along == "channels"
    return not along_channels if name == "factor" else along_channels or name in TOKEN_PARTS


def pack_tensor(
    x: Float[Tensor, "batch kv_heads tokens head_dim"],
    spec: TensorSpec,
    spans: BlockTable,
    decoding: bool = False,
) -> PackedTensor:
    """Quantize and pack the tokens of x, each span of `spans` with ranges of its own.

    Tokens past a sequence's length are padding and enter no statistic.
    decoding: the tokens leave a window at a decode step, for `spec.hybrid_at`.
    """
    check_packed(spec)
    dtype, x = x.dtype, in_basis(x, spec)
    along_channels = spec.along == "channels"
    blocks = spans if along_channels and not spec.factors else spans.split(spec.block_tokens)
    x, extra = _divided(x, spec, blocks)
    if spec.along == "channels":
        mask = valid_mask(spans.lengths, x.shape[2])[:, None].expand(x.shape[:3])
        parts = _packed_parts(quantize(x, spec, mask, decoding=decoding), spec)
    else:
        parts = _pack_blocks(x, spec, blocks, decoding)
    return PackedTensor(
        spec=spec, head_dim=x.shape[-1], dtype=dtype, blocks=blocks, **parts, **extra
    )


def _divided(x: Tensor, spec: TensorSpec, blocks: BlockTable) -> tuple[Tensor, dict[str, Tensor]]:
    """(x divided by its factors, the factors by name); x itself without factors."""
    if spec.factors is None:
        return x, {}
    valid = valid_mask(blocks.lengths, x.shape[2])[:, None, :, None]
    x = widened(x).masked_fill(~valid, 0)
    if spec.factors == NORM:
        x, factor = divided_by_norm(x, spec)
        return x, {"factor": factor}
    slots = blocks.to_slots(x)
    slots, factor = divided_blocks(slots, blocks.mask[:, None].expand(slots.shape[:4]), spec)
    if spec.along != "channels":
        factor = blocks.to_tokens(factor.unsqueeze(-1))
    return blocks.to_tokens(slots), {"factor": factor}


def pack_groups(
    x: Float[Tensor, "batch kv_heads tokens head_dim"], spec: TensorSpec, decoding: bool = False
) -> dict[str, Tensor]:
    """Make the tensors of `pack_tensor` for whole groups of all sequences, without a table.

    x: a multiple of `spec.group` tokens, where groups run along tokens; all of them are valid.
    """
    check_packed(spec)
    x = in_basis(x, spec)
    extra: dict[str, Tensor] = {}
    if spec.factors is not None or spec.heads == "all":
        whole = BlockTable.uniform(len(x), x.shape[2], spec.block_tokens or x.shape[2], x.device)
    # Splitting a table reads its lengths from the device, which no captured step may.
    if spec.factors is not None:
        x, extra = _divided(x, spec, whole)
    if spec.along == "channels":
        return _packed_parts(quantize(x, spec, decoding=decoding), spec) | extra
    if spec.heads == "all":
        return extra | _pack_blocks(x, spec, whole, decoding)
    slots = x.unflatten(2, (-1, spec.group))
    parts = _packed_parts(quantize(slots, spec.replace(group=None), decoding=decoding), spec)
    return extra | {
        name: part.flatten(2, 3) if name in TOKEN_PARTS else part.squeeze(3)
        for name, part in parts.items()
    }


def in_basis(x: Tensor, spec: TensorSpec) -> Tensor:
    """Rotate K or V [batch, kv_heads, tokens, head_dim] in fp32; without a basis return x."""
    if spec.transform is None:
        return x
    return into_basis(widened(x), spec.transform)


def widened(x: Tensor) -> Tensor:
    """Convert numbers of 16 bits to fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _pack_blocks(
    x: Tensor, spec: TensorSpec, blocks: BlockTable, decoding: bool
) -> dict[str, Tensor]:
    """Quantize block by block; return codes in token order, and parameters with a row per block."""
    slots = blocks.to_slots(x)
    if spec.heads == "all":
        return _pack_heads_as_one(slots, spec, blocks, decoding)
    mask = blocks.mask[:, None].expand(slots.shape[:4])
    parts = _packed_parts(quantize(slots, spec.replace(group=None), mask, decoding), spec)
    return {
        name: blocks.to_tokens(part) if name in TOKEN_PARTS else part.squeeze(3)
        for name, part in parts.items()
    }


def _pack_heads_as_one(
    slots: Tensor, spec: TensorSpec, blocks: BlockTable, decoding: bool
) -> dict[str, Tensor]:
    """As `_pack_blocks`, with one range for all heads, which each of them stores."""
    heads, channels = slots.shape[1], slots.shape[4]
    joined = slots.permute(0, 2, 3, 1, 4).flatten(3)
    q = quantize(joined, spec.replace(group=None, heads="each"), blocks.mask, decoding)

    def by_head(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.unflatten(3, (heads, channels)).permute(0, 3, 1, 2, 4)

    def of_each(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, None].expand(-1, heads, *x.shape[1:]).contiguous()

    rows = {name: of_each(getattr(q, name)) for name in ("scale", "zero_point", "symmetric")}
    q = replace(q, codes=by_head(q.codes), negative=by_head(q.negative), **rows)
    parts = _packed_parts(q, spec)
    return {
        name: blocks.to_tokens(part) if name in TOKEN_PARTS else part.squeeze(3)
        for name, part in parts.items()
    }


def _packed_parts(q: Quantized, spec: TensorSpec) -> dict[str, Tensor]:
    """Make the tensors of a PackedTensor that `spec` uses; q may be one whole group."""
    if q.classes is not None:
        return _in_bytes(_sorted_by_class(q, q.classes), spec)
    parts = {"codes": pack(q.codes, q.spec.bits), "scale": q.scale}
    if q.symmetric is not None:
        parts["symmetric"] = pack(q.symmetric.byte(), 1)
    if has_slot(spec):
        width = slot_bytes(spec, q.codes.shape[-1])
        signs = group(q.negative, q.spec)
        return parts | {"slot": fill_slots(q.zero_point, signs, q.symmetric, width)}
    if q.zero_point is not None:
        parts["zero_point"] = q.zero_point
    if q.negative is not None:
        parts["negative"] = pack(q.negative.byte(), 1)
    return _in_bytes(parts, spec)


def _in_bytes(parts: dict[str, Tensor], spec: TensorSpec) -> dict[str, Tensor]:
    """Parts with parameters as the spec stores them; their numbers are rounded already."""
    if spec.param_dtype != "float8":
        return parts
    rows = {"scale": SCALE, "zero_point": MIDDLE}
    return parts | {name: to_bytes(parts[name], form) for name, form in rows.items()}


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
