"""The rotary kernel of the bench's decoder against plain torch, in Triton's interpreter."""

import pytest
import torch

from duotone.bench.linears import elementwise

pytest.importorskip("triton", reason="the kernel needs triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "q_heads", "width"),
    [(1, 5, 4, 128), (3, 40, 32, 64), (2, 9, 3, 96)],
    ids=str,
)
def test_rotates_as_plain_torch(
    rows: int, heads: int, q_heads: int, width: int, dtype: torch.dtype
) -> None:
    from duotone.bench.rotary import rotate

    x = torch.randn(rows, heads + 2, width).to(dtype)[:, :heads]
    angles = torch.rand(rows, 1, width // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found = rotate(x, cos, sin, q_heads)
    wanted = elementwise(False).rotate(x.float(), cos.float(), sin.float(), q_heads)
    for one, other in zip(found, wanted, strict=True):
        assert one.is_contiguous()
        # the interpreter cuts off what bfloat16 has no room for
        rtol = 2**-7 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(one, other.to(dtype), rtol=rtol, atol=1e-6)
