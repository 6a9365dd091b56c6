"""Layers that take in a prompt together, beside layers that take it in one by one."""

import torch
from torch import Tensor

import duotone
from duotone.attention.plan import Shape, resolve
from duotone.cache import LayerStore, Ledger
from duotone.cache.alike import Structure
from duotone.cache.pair import Layouts
from duotone.cache.together import applied_together, can_join, form_of
from duotone.quant import CacheSpec, KVSpec

from cases import device

LAYERS, HEADS, HEAD_DIM, TOKENS = 3, 2, 64, 331
SPECS: dict[str, CacheSpec] = {
    "duotone 1": duotone.scheme("duotone", bits=1),
    "duotone 2": duotone.scheme("duotone", bits=2),
    "duotone 4": duotone.scheme("duotone", bits=4),
    "mixed": duotone.scheme("duotone-mixed", bits=4),
    "minmax": duotone.scheme("minmax", bits=2),
    "kivi": duotone.scheme("kivi", bits=2),
    "lag": duotone.scheme("kivi", bits=2).replace(
        text=KVSpec(
            duotone.TensorSpec(2, group=32), duotone.TensorSpec(2, "channels", 32, lag=9)
        ),
        flush=32,
        recent=0,
    ),
}  # fmt: skip


def prompt(batch: int) -> tuple[Tensor, Tensor]:
    """(visual, real) of left-padded sequences with pictures of different sizes among text."""
    visual = torch.zeros(batch, TOKENS, dtype=torch.bool)
    real = torch.ones_like(visual)
    for b in range(batch):
        real[b, : 5 * b] = False
        visual[b, 20 + b : 130 - 7 * b] = visual[b, 140 : 189 + b] = True
    return visual.to(device()), real.to(device())


def states(batch: int, dtype: torch.dtype) -> list[Tensor]:
    """K or V of each layer, with a channel that sticks out in another place in each."""
    made = [torch.randn(batch, HEADS, TOKENS, HEAD_DIM) for _ in range(LAYERS)]
    for layer, x in enumerate(made):
        x[..., 3 + layer] += 40
    return [x.to(device(), dtype) for x in made]


def layouts(spec: CacheSpec, dtype: torch.dtype) -> Layouts:
    """Orders that the decode kernels of a GPU want."""
    return resolve(spec, Shape(HEAD_DIM, HEADS, HEADS, dtype)).layouts


def assert_equal(found: LayerStore, alone: LayerStore) -> None:
    """Assert that two stores hold the same bits in the same order."""
    assert found.dtype == alone.dtype
    one, other = (_parts(store) for store in (found, alone))
    assert one.is_like(other)
    for x, y in zip(one.tensors, other.tensors, strict=True):
        assert x.is_contiguous()
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def _parts(store: LayerStore) -> Structure:
    names = ("visual", "background", "stream", "key", "value", "key_norm", "lag_values")
    return Structure.of([*(getattr(store, name) for name in names), store.lag_lengths])


def assert_together(spec: CacheSpec, batch: int, dtype: torch.dtype) -> list[LayerStore]:
    """Assert that layers together get the bits that each gets alone, in three turns.

    The last one has words alone. Returns the layers alone.
    """
    torch.manual_seed(0)
    visual, real = prompt(batch)
    alone, together = (
        [LayerStore(spec, layouts(spec, dtype)) for _ in range(LAYERS)] for _ in range(2)
    )
    assert all(map(can_join, together))
    ledger = Ledger(spec, batch, device())
    for is_visual in (visual, visual, torch.zeros_like(visual)):
        plan = ledger.plan(is_visual, real)
        keys, values = states(batch, dtype), states(batch, dtype)
        for store, key, value in zip(alone, keys, values, strict=True):
            store.apply(plan, key, value)
        assert all(form_of(store, plan) == form_of(together[0], plan) for store in together)
        together = applied_together(together, plan, keys, values)
        for found, right in zip(together, alone, strict=True):
            assert_equal(found, right)
    return alone
