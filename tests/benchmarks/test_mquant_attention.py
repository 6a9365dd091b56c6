"""The step's attention against torch: RoPE, the new token in the cache, codes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

import mquant_attention
from linear_cases import DEVICE

KV, GROUP, D = 2, 3, 32


def turned(x: Tensor, at: int) -> Tensor:
    """RoPE of x [..., D] at position `at`, fp32."""
    angle = at * torch.exp(torch.arange(D // 2) * (-2 / D * math.log(1e6)))
    first, second = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def reference(qkv: Tensor, keys: Tensor, values: Tensor, at: int) -> Tensor:
    heads = qkv.view(len(qkv), -1, D)
    query = turned(heads[:, : KV * GROUP], at).bfloat16().view(len(qkv), KV, GROUP, D)
    keys[:, :, at] = turned(heads[:, KV * GROUP : -KV], at).bfloat16()
    values[:, :, at] = heads[:, -KV:]
    k, v = keys[:, :, : at + 1].float(), values[:, :, : at + 1].float()
    return F.scaled_dot_product_attention(query.float(), k, v).flatten(1)


@pytest.mark.parametrize(("length", "at"), [(40, 20), (150, 149)])
def test_attention_of_a_new_token(length: int, at: int) -> None:
    torch.manual_seed(length)
    qkv = torch.randn(2, (KV * GROUP + 2 * KV) * D).bfloat16()
    keys, values = (torch.randn(2, KV, length, D).bfloat16() for _ in range(2))
    mine = [x.clone().to(DEVICE) for x in (qkv, keys, values)]
    wanted = reference(qkv, keys, values, at)
    position = torch.tensor([at], dtype=torch.int32, device=DEVICE)
    table = mquant_attention.rope_table(length, D, DEVICE)
    found = mquant_attention.attend(*mine, table, position, None).cpu()
    torch.testing.assert_close(mine[1].cpu(), keys, rtol=0.01, atol=0.01)
    assert torch.equal(mine[2].cpu(), values)
    torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.02)
    assert not torch.allclose(found.float(), wanted.flip(0), rtol=0.02, atol=0.02)
    scale = torch.tensor([0.01], device=DEVICE)
    codes = mquant_attention.attend(*mine, table, position, scale).cpu()
    assert torch.equal(codes, (found.float() / 0.01).round().clamp(-127, 127).to(torch.int8))
