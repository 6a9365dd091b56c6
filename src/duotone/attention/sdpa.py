"""Order of PyTorch's kernels of scaled_dot_product_attention, for few scores.

cuDNN plans for 50 to 80 ms at every shape that it has not met, and prompts seldom have a length
twice (H200, torch 2.11). Its kernels are faster by 0.4 ns per 1,000 scores, with a mask by 1.5.
At the bounds below that is some 10 ms in all layers of an 8B model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock

from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

# Scores of all heads of a batch in one layer, without and with a mask.
FEW_CAUSAL, FEW_MASKED = 1 << 30, 1 << 28
# Kernels in their order, each with the switch that a user may have turned off.
UNPLANNED_FIRST = (
    (SDPBackend.FLASH_ATTENTION, cuda.flash_sdp_enabled),
    (SDPBackend.EFFICIENT_ATTENTION, cuda.mem_efficient_sdp_enabled),
    (SDPBackend.CUDNN_ATTENTION, cuda.cudnn_sdp_enabled),
    (SDPBackend.MATH, cuda.math_sdp_enabled),
)

# All threads have one order; two that change it at a time could leave it changed.
_ORDER = Lock()


def in_order_for(query: Tensor, tokens: int, masked: bool) -> AbstractContextManager[None]:
    """Block in which kernels without plans come first, where there are few scores on a GPU.

    query: [batch, heads, queries, head_dim]. tokens: that each query may see. masked: a mask tells
    these, not their order. Kernels that are off stay off.
    """
    scores = query.shape[:3].numel() * tokens
    if not query.is_cuda or scores > (FEW_MASKED if masked else FEW_CAUSAL):
        return nullcontext()
    return _unplanned_first()


@contextmanager
def _unplanned_first() -> Iterator[None]:
    with _ORDER, sdpa_kernel([x for x, is_on in UNPLANNED_FIRST if is_on()], set_priority=True):
        yield
