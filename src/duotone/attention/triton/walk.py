"""Tokens that a program of decode attention walks: splits, blocks, tiles of blocks, masks."""

# Constants of Triton are upper case.

import triton
import triton.language as tl


@triton.jit
def find_block(p_offsets, blocks, i_t, LONGEST: tl.constexpr):
    """Block of token i_t: the number of inner edges that are <= i_t.

    No block is longer than LONGEST tokens, so the search starts there and stops early.
    """
    i_block = i_t // LONGEST
    found = 64
    while found == 64:
        o_edge = i_block + 1 + tl.arange(0, 64)
        b_edge = tl.load(p_offsets + o_edge, mask=o_edge < blocks, other=0)
        found = tl.sum(((b_edge <= i_t) & (o_edge < blocks)).to(tl.int32), 0)
        i_block += found
    return i_block


@triton.jit
def block_end(p_offsets, blocks, i_block, stop):
    """End of block i_block; the last block reaches to `stop`."""
    return tl.load(p_offsets + i_block + 1, mask=i_block + 1 < blocks, other=stop).to(tl.int32)


@triton.jit
def block_tile(p_offsets, blocks, i_block, i_tile, start, stop, BN: tl.constexpr):
    """[first, end) of tile i_tile of a block, cut to the part of the block in [start, stop)."""
    first = tl.maximum(tl.load(p_offsets + i_block).to(tl.int32), start) + i_tile * BN
    return first, tl.minimum(block_end(p_offsets, blocks, i_block, stop), stop)


@triton.jit
def split_range(p_lengths, i_b, i_split, splits, BN: tl.constexpr):
    """[start, stop) of a split: an equal share of this sequence's own length, in whole tiles."""
    length = tl.load(p_lengths + i_b).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, splits), BN) * BN
    start = tl.minimum(i_split * share, length)
    return start, tl.minimum(start + share, length)


@triton.jit
def visible_tokens(p_mask, i_b, mask_width, o_t, m_t, HAS_MASK: tl.constexpr):
    """Mask of the tokens of a tile that the query sees: inside the sequence, and not masked."""
    if HAS_MASK:
        m_t = m_t & tl.load(p_mask + i_b.to(tl.int64) * mask_width + o_t, mask=m_t, other=0)
    return m_t
