"""Packed tensors in canonical order: equal where they have tokens."""

import torch

from duotone.cache import PackedTensor


def assert_same_tokens(mine: PackedTensor, theirs: PackedTensor) -> None:
    """Codes of tokens and parameters of blocks that have any."""
    assert mine.tensor_names() == theirs.tensor_names()
    for b, n in enumerate(theirs.blocks.lengths.tolist()):
        assert torch.equal(mine.codes[b, :, :n], theirs.codes[b, :, :n])
        filled = theirs.blocks.sizes[b] > 0
        for part in {*theirs.tensor_names()} - {"codes"}:
            assert torch.equal(
                getattr(mine, part)[b][:, filled], getattr(theirs, part)[b][:, filled]
            )
