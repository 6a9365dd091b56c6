"""Random quantized linears and their sums computed another way."""

from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.weights.kernels.reference import scaled
from duotone.weights.modules.packed_weight import PackedWeight, pack_int4

# fp32 sums of groups in another order: relative RMS, and the largest error over the largest |y|.
GROUPED_RMS, GROUPED_LARGEST = 1e-6, 1e-5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Problem:
    """Arguments of linear_int."""

    x_q: Tensor
    row_scale: Tensor
    weight: PackedWeight
    x0: Tensor | None
    bias: Tensor | None

    @property
    def arguments(self) -> tuple:
        return self.x_q, self.row_scale, self.weight, self.x0, self.bias


def random_weight(
    outs: int, ins: int, bits: int, *, group: int | None = None, split: bool = False
) -> PackedWeight:
    """All codes, the extremes -8 and +-127 among them."""
    most = {4: 7, 8: 127}[bits]
    codes = torch.randint(-most - (bits == 4), most + 1, (outs, ins), dtype=torch.int8)
    w0 = None
    if split:
        codes[:, 0] = 0
        w0 = torch.randn(outs).bfloat16().to(DEVICE)
    scale = torch.rand((outs,) if group is None else (outs, ins // group)) * 0.01 + 0.001
    codes = (pack_int4(codes) if bits == 4 else codes).to(DEVICE)
    return PackedWeight(codes, bits, scale.to(DEVICE), group, w0)


def random_problem(
    tokens: int,
    outs: int,
    ins: int,
    bits: int,
    *,
    group: int | None = None,
    split: bool = False,
    bias: bool = False,
) -> Problem:
    """Two row scales mixed as MSQ has them; codes up to +-127."""
    x_q = torch.randint(-127, 128, (tokens, ins), dtype=torch.int8).to(DEVICE)
    row_scale = torch.where(torch.rand(tokens) < 0.5, 0.031, 0.7).to(DEVICE)
    x0 = torch.randn(tokens).bfloat16().to(DEVICE) if split else None
    b = torch.randn(outs).bfloat16().to(DEVICE) if bias else None
    weight = random_weight(outs, ins, bits, group=group, split=split)
    return Problem(x_q, row_scale, weight, x0, b)


def expected(problem: Problem) -> Tensor:
    """fp32 result from int64 sums; groups are added in ascending order."""
    x, codes = problem.x_q.cpu().long(), problem.weight.unpacked().cpu().long()
    scale, rows = problem.weight.scale.cpu(), problem.row_scale.cpu()[:, None]
    if scale.dim() == 1:
        y = (x @ codes.T).float() * rows * scale
    else:
        size, y = problem.weight.group_size, torch.zeros(len(x), len(codes))
        for x_g, codes_g, scale_g in zip(
            x.split(size, 1), codes.split(size, 1), scale.T, strict=True
        ):
            y += (x_g @ codes_g.T).float() * scale_g
        y = y * rows
    if problem.x0 is not None:
        y = y + problem.x0.cpu().float()[:, None] * problem.weight.w0.cpu().float()
    if problem.bias is not None:
        y = y + problem.bias.cpu().float()
    return y.to(DEVICE)


def by_int_mm(
    x_q: Tensor,
    row_scale: Tensor,
    weight: PackedWeight,
    x0: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Result of cuBLASLt's exact int32 sums, for more than 16 tokens and sizes in eights."""
    return scaled(torch._int_mm(x_q, weight.codes.T), row_scale, weight, x0, bias, dtype)


def assert_grouped_close(y: Tensor, wanted: Tensor, exact: bool) -> None:
    """fp32 results of grouped weights: equal, or within the tolerance that linear_int documents."""
    if exact:
        torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    error = y - wanted
    assert error.norm() <= GROUPED_RMS * wanted.norm()
    assert error.abs().max() <= GROUPED_LARGEST * wanted.abs().max()
