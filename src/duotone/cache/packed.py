"""One packed tensor (K or V) of one layer: codes in canonical packing, scales, zero-points."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.ragged import Lengths, Move, owned
from duotone.quant import TensorSpec, unpack
from duotone.quant.classes import (
    CLASS_BITS,
    class_counts,
    class_order,
    unpack_classes,
)
from duotone.quant.codebooks import decoded_levels
from duotone.quant.honours import check_read
from duotone.quant.rotation import out_of_basis
from duotone.quant.slots import (
    group_elements,
    slot_signs,
    slot_zero_points,
)
from duotone.quant.small_floats import MIDDLE, SCALE, from_bytes, lowest_levels

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
        return self.rotated_back(self.multiplied(self.without_factors(torch.float32)))

    def rotated_back(self, value: Tensor) -> Float[Tensor, "batch kv_heads tokens head_dim"]:
        """Elements out of the basis of quantization, in the model's dtype."""
        return out_of_basis(value, self.spec.transform).to(self.dtype)

    @property
    def decoded_dtype(self) -> torch.dtype:
        """Type of elements in the basis of quantization; float32 where they are rotated back."""
        return self.dtype if self.spec.transform is None else torch.float32

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

    @property
    def by_head(self) -> dict[str, Tensor]:
        """Tensors [batch, kv_heads, ...]; factors may have one for all heads."""
        return {name: getattr(self, name) for name in self.tensor_names()}

    def tensor_names(self) -> list[str]:
        """Names of the tensor fields that are not None."""
        return [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]

    def _has_token_axis(self, name: str) -> bool:
        return has_token_axis(self.spec, name)


def has_token_axis(spec: TensorSpec, name: str) -> bool:
    """True for a part with a row per token, False for one with a row per block."""
    along_channels = spec.along == "channels"
    return not along_channels if name == "factor" else along_channels or name in TOKEN_PARTS
