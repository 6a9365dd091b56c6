"""Errors of long contexts do not grow with their length: kernels against float64, on a real GPU."""

import importlib.util

import pytest
import torch
from cuda_device import NEEDS_KERNELS
from long_cases import Long, check

from duotone.serve.flash import flash
from duotone.serve.pages import PageLayout
from duotone.serve.windows import attention

pytestmark = NEEDS_KERNELS
BF16 = torch.bfloat16
LAYOUTS = [PageLayout(bits, head_dim, BF16) for bits in (2, 4) for head_dim in (64, 128, 256)]
# Rounding of an answer to bfloat16, which none here is: queries and outputs are in fp32.
MOST = 2**-8
# FlashAttention rounds outputs of windows to it, and weights.
MOST_OF_FLASH = 2**-6


@pytest.mark.parametrize("gqa", [1, 4, 7])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_decode_steps(layout: PageLayout, gqa: int) -> None:
    check(Long(layout, gqa, new=1, kv_heads=2, device="cuda").decoded(), MOST)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_short_chunks(layout: PageLayout) -> None:
    case = Long(layout, 4, new=9, kv_heads=2, device="cuda")
    check(case.together(attention, is_short=True), MOST)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_merged_windows(layout: PageLayout) -> None:
    case = Long(layout, 4, new=33, kv_heads=2, device="cuda")
    check(case.together(attention, is_short=False), MOST)


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM's FlashAttention")
@pytest.mark.parametrize("new", [9, 33])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_merged_windows_of_flash_attention(layout: PageLayout, new: int) -> None:
    case = Long(layout, 4, new=new, kv_heads=2, query_dtype=BF16, device="cuda")
    check(case.together(flash, is_short=new == 9), MOST_OF_FLASH)
