"""Dense tokens that the decode kernel takes, and reasons against the rest."""

from dataclasses import replace

import pytest
import torch

from duotone.attention.cuda.dense import decode as dense_decode
from duotone.attention.cuda.dense.family import DENSE
from duotone.attention.family import Tokens

from cases import Case, build


def refusal(query, segment) -> str | None:
    return DENSE.refusal(Tokens.of(query, segment), query, segment)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dense_dtype": torch.float32}, "16-bit type"),
        ({"head_dim": 72}, "head_dim 72"),
        ({"head_dim": 64, "value_dim": 32}, "head_dim 64 and 32"),
        ({"gqa": 17}, "17 q heads"),
    ],
    ids=["fp32", "d72", "value_dim", "gqa17"],
)
def test_what_the_dense_kernel_lacks_has_a_reason(change, reason) -> None:
    query, (_, dense) = build(Case((40,), dense=(9,), **change))
    assert reason in refusal(query, dense)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
def test_a_warps_sums_fit_where_its_ring_was(head_dim) -> None:
    form = dense_decode.DenseFormat(head_dim)
    assert 16 * (head_dim + 8) * 4 <= form.stages * form.nbytes
    assert form.nbytes // (2 * form.tokens) // 16 % 2


def test_tokens_apart_and_masks_are_not_for_the_dense_kernel() -> None:
    query, (_, dense) = build(Case((40,), dense=(9,)))
    assert refusal(query, dense) is None
    states = torch.zeros(1, 1, 12, 2, 64).bfloat16()[..., 0, :]
    assert "adjacent" in refusal(query, replace(dense, key=states, value=states))
    mask = torch.ones(1, 1, 12, dtype=torch.bool)
    assert "mask" in refusal(query, replace(dense, mask=mask))
