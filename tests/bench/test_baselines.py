"""Backends of others: each computes attention, or says why it does not."""

import pytest
import torch

from duotone.bench.baselines import BASELINES, UnavailableError
from duotone.bench.row_bench import compare, reference
from duotone.bench.rows import DenseRow
from duotone.bench.shapes import Shape

ROWS = {baseline.name: DenseRow(baseline) for baseline in BASELINES}


def test_two_matmuls_are_attention_of_16_bit_k_and_v():
    row, shape = ROWS["two matmuls"], Shape(2, 6, 2, 48, 64)
    torch.manual_seed(0)
    problem = row.problem(shape, torch.device("cpu"))
    compare(row.call(problem)().reshape(problem.query.shape), reference(problem), row.tolerance)
    assert row.nbytes(problem).total == 2 * 2 * 2 * 48 * 64 * 2


def test_flex_says_that_it_needs_a_gpu():
    problem = ROWS["flex, compiled"].problem(Shape(1, 2, 1, 48, 64), torch.device("cpu"))
    with pytest.raises(UnavailableError, match="CUDA devices only"):
        ROWS["flex, compiled"].call(problem)
