"""Spans that fill no records on a real GPU, and pictures of a second turn: kernels pack them."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS
from short_spans import EDGES, KINDS, assert_same_canonical, packed_short

import duotone
from duotone.attention.cuda.classes import pack as class_pack
from duotone.attention.plan import Shape, resolve
from duotone.attention.refused import RefusedError
from duotone.cache import LayerStore, Ledger

from pack_cases import BF16

pytestmark = NEEDS_KERNELS


def no_kernel(*_) -> None:
    raise RefusedError("torch finds them here")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_spans_that_fill_no_records_are_canonical(edges, kind, monkeypatch) -> None:
    # Levels are torch's, so that bytes can be compared.
    monkeypatch.setattr(class_pack.search, "check", no_kernel)
    assert_same_canonical(*packed_short(*KINDS[kind], edges))


@pytest.mark.parametrize("tokens", [81, 144, 256])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_no_turn_takes_torch(bits, tokens, monkeypatch) -> None:
    """Two turns with two pictures each; levels and codes are of kernels."""
    for name in ("cache.pair.pack_tensor", "attention.cuda.classes.pack.torch_levels"):
        monkeypatch.delattr(f"duotone.{name}")
    spec = duotone.scheme("duotone", bits=bits).at_layer(1)
    visual = torch.ones(2, 2 * tokens + 9, dtype=torch.bool, device="cuda")
    visual[:, :5] = visual[:, 5 + tokens : 9 + tokens] = False
    real = torch.ones_like(visual)
    states = [torch.randn(2, 2, visual.shape[1], 64, device="cuda", dtype=BF16) for _ in range(2)]
    ledger = Ledger(spec, 2, visual.device)
    store = LayerStore(spec, resolve(spec, Shape(64, 4, 2, BF16)).layouts)
    for turn in (1, 2):
        store.apply(ledger.plan(visual, real), *states)
        parts = [store.visual, store.background]
        assert sum(pair.value.blocks.tokens for pair in parts if pair) == turn * 2 * tokens
