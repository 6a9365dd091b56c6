"""Groups, elements that share one scale: views of x [..., tokens, channels], a group per row.

    along="tokens"    [..., blocks, channels, group]      a group is a block of tokens of a channel
    along="channels"  [..., tokens, blocks, group]        a block of channels of a token
    along="span"      [..., blocks, 1, group * channels]  a block of tokens, all channels

A last block that is too short is filled up with zeros; the mask, grouped alike, excludes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor

from duotone.quant.spec import TensorSpec


class GroupSizes(NamedTuple):
    """Tokens and channels that one parameter covers."""

    tokens: int
    channels: int


def group_sizes(spec: TensorSpec, tokens: int, channels: int) -> GroupSizes:
    """Extent of one group in an x of `tokens` x `channels`."""
    if spec.along == "channels":
        return GroupSizes(1, min(spec.group or channels, channels))
    size = max(1, min(spec.group or tokens, tokens))
    return GroupSizes(size, channels if spec.along == "span" else 1)


def group(x: Shaped[Tensor, "*b tokens channels"], spec: TensorSpec) -> Shaped[Tensor, "*b r c n"]:
    """Arrange x with one group per row of the last axis; zeros (False) fill the last block up."""
    tokens, channels = x.shape[-2:]
    size = group_sizes(spec, tokens, channels)
    if spec.along == "channels":
        x = F.pad(x, (0, -channels % size.channels))
        return x.unflatten(-1, (-1, size.channels))
    x = F.pad(x, (0, 0, 0, -tokens % size.tokens)).unflatten(-2, (-1, size.tokens))
    if spec.along == "span":
        return x.flatten(-2).unsqueeze(-2)
    return x.transpose(-1, -2)


def ungroup(
    groups: Shaped[Tensor, "*b r c n"], spec: TensorSpec, tokens: int, channels: int
) -> Shaped[Tensor, "*b {tokens} {channels}"]:
    """Inverse of `group`."""
    if spec.along == "channels":
        return groups.flatten(-2)[..., :channels]
    if spec.along == "span":
        groups = groups.squeeze(-2).unflatten(-1, (-1, channels))
    else:
        groups = groups.transpose(-1, -2)
    return groups.flatten(-3, -2)[..., :tokens, :]
