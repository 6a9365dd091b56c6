"""One packed tensor (K or V) of one layer: codes in canonical packing, scales, zero-points."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.ragged import Lengths, Move, valid_mask
from duotone.quant import TensorSpec, pack, quantize, unpack
from duotone.quant.affine import Quantized

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
    blocks: which tokens share a row of parameters.
    """

    spec: TensorSpec
    head_dim: int
    dtype: torch.dtype
    blocks: BlockTable
    codes: Codes
    scale: Params
    zero_point: Params | None = None
    negative: UInt8[Tensor, "batch kv_heads tokens sign_bytes"] | None = None
    symmetric: UInt8[Tensor, "batch kv_heads rows mode_bytes"] | None = None

    @property
    def tokens(self) -> int:
        """Width of the token axis (the longest sequence)."""
        return self.codes.shape[2]

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
        stored = (self.scale, self.zero_point, self.symmetric)
        return sum(t.nbytes for t in stored if t is not None)

    def unpacked(self) -> UInt8[Tensor, "batch kv_heads tokens head_dim"]:
        """The codes, one per byte (magnitudes, for sign-and-magnitude mappings)."""
        return unpack(self.codes, self.spec.bits, self.head_dim)

    def signed_codes(self, dtype: torch.dtype) -> Tensor:
        """The codes as numbers, signs applied: what scale and zero_point belong to."""
        codes = self.unpacked().to(dtype)
        if self.negative is None:
            return codes
        return torch.where(unpack(self.negative, 1, self.head_dim).bool(), -codes, codes)

    def dequantize(self) -> Float[Tensor, "batch kv_heads tokens head_dim"]:
        """x_hat in the model's dtype; tokens past a sequence's length hold anything."""
        value = self.signed_codes(torch.float32) * self._per_element(self.scale)
        if self.zero_point is not None:
            value = value + self._per_element(self.zero_point)
        return value.to(self.dtype)

    def _per_element(self, parameter: Params) -> Tensor:
        parameter = parameter.float()
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
        return self.per_token or name in ("codes", "negative")


def pack_tensor(
    x: Float[Tensor, "batch kv_heads tokens head_dim"], spec: TensorSpec, spans: BlockTable
) -> PackedTensor:
    """Quantize and pack the tokens of x, each span of `spans` with ranges of its own.

    Tokens past a sequence's length are padding and enter no statistic.
    """
    if spec.along == "channels":
        blocks, quantized = spans, quantize(x, spec, _mask(x, spans.lengths))
    else:
        blocks, quantized = _quantize_blocks(x, spec, spans)
    negative, symmetric = quantized.negative, quantized.symmetric
    return PackedTensor(
        spec=spec,
        head_dim=x.shape[-1],
        dtype=x.dtype,
        blocks=blocks,
        codes=pack(quantized.codes, spec.bits),
        scale=quantized.scale,
        zero_point=quantized.zero_point,
        negative=None if negative is None else pack(negative.byte(), 1),
        symmetric=None if symmetric is None else pack(symmetric.byte(), 1),
    )


def _mask(x: Tensor, lengths: Lengths) -> Bool[Tensor, "batch kv_heads tokens"]:
    return valid_mask(lengths, x.shape[2])[:, None].expand(x.shape[:3])


def _quantize_blocks(
    x: Tensor, spec: TensorSpec, spans: BlockTable
) -> tuple[BlockTable, Quantized]:
    """Quantize block by block; codes come back in token order, parameters one row per block."""
    blocks = spans.split(spec.group)
    slots = blocks.to_slots(x)
    mask = blocks.mask[:, None].expand(slots.shape[:4])
    q = quantize(slots, spec.replace(group=None), mask)

    def per_token(value: Tensor | None) -> Tensor | None:
        return None if value is None else blocks.to_tokens(value)

    def per_block(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.squeeze(3)

    return blocks, replace(
        q,
        codes=per_token(q.codes),
        negative=per_token(q.negative),
        scale=per_block(q.scale),
        zero_point=per_block(q.zero_point),
        symmetric=per_block(q.symmetric),
    )
