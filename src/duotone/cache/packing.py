"""Quantizing and packing K or V of one layer into a `PackedTensor`."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.packed import TOKEN_PARTS, PackedTensor
from duotone.cache.ragged import valid_mask
from duotone.quant import TensorSpec, pack, quantize
from duotone.quant.affine import Quantized
from duotone.quant.classes import CLASS_BITS, class_order, coded_channels, pack_classes
from duotone.quant.factors import NORM, divided_blocks, divided_by_norm
from duotone.quant.grouping import group
from duotone.quant.honours import check_packed
from duotone.quant.rotation import into_basis
from duotone.quant.slots import fill_slots, has_slot, slot_bytes
from duotone.quant.small_floats import MIDDLE, SCALE, to_bytes


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
    blocks = spans.split(spec.row_tokens)
    parts = _parts(x, spec, blocks, decoding)
    return PackedTensor(spec=spec, head_dim=x.shape[-1], dtype=dtype, blocks=blocks, **parts)


def _parts(x: Tensor, spec: TensorSpec, blocks: BlockTable, decoding: bool) -> dict[str, Tensor]:
    """Quantize x in its basis; return the tensors of a `PackedTensor` by name."""
    x, extra = _divided(x, spec, blocks)
    if spec.along != "channels":
        return extra | _pack_blocks(x, spec, blocks, decoding)
    mask = valid_mask(blocks.lengths, x.shape[2])[:, None].expand(x.shape[:3])
    return extra | _packed_parts(quantize(x, spec, mask, decoding), spec)


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
    # Splitting a table reads its lengths from the device, which no captured step may.
    blocks = BlockTable.uniform(len(x), x.shape[2], spec.row_tokens, x.device)
    return _parts(x, spec, blocks, decoding)


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
    """Quantize block by block."""
    slots = blocks.to_slots(x)
    if spec.heads == "all":
        return _pack_heads_as_one(slots, spec, blocks, decoding)
    mask = blocks.mask[:, None].expand(slots.shape[:4])
    parts = _packed_parts(quantize(slots, spec.replace(group=None), mask, decoding), spec)
    return _of_tokens(parts, blocks)


def _of_tokens(parts: dict[str, Tensor], blocks: BlockTable) -> dict[str, Tensor]:
    """Parts of slots: codes in token order, parameters with a row per block."""
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
    return _of_tokens(_packed_parts(q, spec), blocks)


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
