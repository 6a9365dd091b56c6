"""Errors of long contexts do not grow with their length, by plain torch and by kernels on a CPU."""

from collections.abc import Callable

import pytest
import torch
from long_cases import Long, check
from test_decode_on_cpu import missing, on_cpu  # noqa: F401

from duotone.serve import ragged, short
from duotone.serve.pages import PageLayout
from duotone.serve.windows import attention

BF16 = torch.bfloat16
# Of sums in fp32. Answers in bfloat16 are rounded by up to 2**-8.
MOST = 1e-4
MOST_OF_KERNELS = 2**-8
# 16 times as long: a GPU takes 32 times.
LENGTHS = (8192, 131072)


@pytest.fixture(scope="module")
def long() -> Long:
    return Long(PageLayout(2, 64, BF16), gqa=2, new=2, lengths=LENGTHS)


def test_one_by_one(long: Long) -> None:
    check(long.one_by_one(), MOST)


def test_short_chunks(long: Long) -> None:
    check(long.together(attention, is_short=True), MOST)


def test_merged_windows(long: Long, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "MOST_ROWS", 0)
    check(long.together(attention, is_short=False), MOST)


def sums_in_16_bit(merge: Callable, sums: torch.Tensor, lse: torch.Tensor, *part) -> None:
    merge(sums, lse, *part)
    sums.copy_(sums.to(BF16))


def weights_in_16_bit(merge: Callable, sums: torch.Tensor, lse: torch.Tensor, *part) -> None:
    merge(sums, lse, *part)
    lse.copy_(lse.to(BF16))


@pytest.mark.parametrize("wrong", [sums_in_16_bit, weights_in_16_bit])
def test_a_wrong_merge_is_seen(
    long: Long, wrong: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short, "MOST_ROWS", 0)
    merge = ragged.merged_by_torch
    monkeypatch.setattr(ragged, "merged_by_torch", lambda *given: wrong(merge, *given))
    with pytest.raises(AssertionError):
        check(long.together(attention, is_short=False), 1.0)


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize(
    "layout", [PageLayout(2, 64, BF16), PageLayout(4, 128, torch.float16)], ids=str
)
@pytest.mark.usefixtures("on_cpu")
def test_the_decode_kernel(layout: PageLayout) -> None:
    check(Long(layout, gqa=1, new=1, lengths=(8192, 65536)).decoded(), MOST_OF_KERNELS)
