"""PyTorch's kernels for few scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from duotone.attention import sdpa
from duotone.attention.sdpa import FEW_CAUSAL, FEW_MASKED, in_order_for

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
TOKENS = 1 << 10


def asked(scores: int, masked: bool, monkeypatch, is_cuda: bool = True) -> list[SDPBackend]:
    """Kernels in the order that a block asks for; none where it leaves all as it is."""
    told: list[SDPBackend] = []

    @contextmanager
    def given(kernels: list[SDPBackend], set_priority: bool) -> Iterator[None]:
        assert set_priority
        told.extend(kernels)
        yield

    monkeypatch.setattr(sdpa, "sdpa_kernel", given)
    query = SimpleNamespace(shape=torch.Size([1, 1, scores // TOKENS, 64]), is_cuda=is_cuda)
    with in_order_for(query, TOKENS, masked):
        return told


@pytest.mark.parametrize(("masked", "most"), [(False, FEW_CAUSAL), (True, FEW_MASKED)])
def test_few_scores_on_a_gpu_pass_cudnn_by(masked: bool, most: int, monkeypatch) -> None:
    found = asked(most, masked, monkeypatch)
    assert found[0] == FLASH
    assert found.index(CUDNN) > 1
    assert not asked(most + TOKENS, masked, monkeypatch)
    assert not asked(most, masked, monkeypatch, is_cuda=False)


def test_kernels_that_a_user_turned_off_stay_off(monkeypatch) -> None:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        found = asked(TOKENS, True, monkeypatch)
    assert found == [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def test_threads_change_the_order_one_after_the_other() -> None:
    query = SimpleNamespace(shape=torch.Size([1, 1, 1, 64]), is_cuda=True)
    entered = Event()

    def enter() -> None:
        with in_order_for(query, TOKENS, masked=False):
            entered.set()

    with in_order_for(query, TOKENS, masked=False):
        other = Thread(target=enter)
        other.start()
        assert not entered.wait(0.2)
    other.join(60)
    assert entered.is_set()
