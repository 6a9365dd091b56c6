"""After the first step none allocates what outlives it, or asks the host: both break graphs."""

import gc

import pytest
import torch
from begun import begin
from no_questions import NoQuestions
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import duotone
from duotone.attention import static
from duotone.attention.cuda import decode
from duotone.attention.cuda.rotate import queries as rotate_queries
from duotone.attention.cuda.shared import counters
from duotone.attention.static import StaticDecoder
from duotone.quant import bases, rotation

from frozen_decoder import Heads, Tokens, frozen_decoder

SHAPE = Heads(2, 4, 2, 64)
STEPS, BATCH = 40, 2
ROTATED = duotone.scheme("kivi", bits=2).replace(
    recent=16,
    text=duotone.KVSpec(
        duotone.TensorSpec(2, group=32, transform="hadamard"),
        duotone.TensorSpec(2, "channels", 32, transform="hadamard"),
    ),
)
SCHEMES = {
    "kivi": duotone.scheme("kivi", bits=2).replace(recent=16),
    "rotated": ROTATED,
    "innerq": duotone.scheme("innerq").replace(sink=4, recent=16),
    "1-bit visual": duotone.scheme("calibquant"),
    "unequal channels": duotone.scheme("duotone-whole", bits=1),
}


class Allocations(TorchDispatchMode):
    """Memory that operations of this thread made inside, like the pool of a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self.made.append(StorageWeakRef(x.untyped_storage()))
        return made

    def left(self) -> int:
        """Pieces that somebody still holds."""
        gc.collect()
        return sum(not ref.expired() for ref in self.made)


def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept yet."""
    for cached in (rotation._hadamard_at, bases.turn, rotate_queries.kernel_matrices):
        cached.cache_clear()
    monkeypatch.setattr(counters, "_COUNTERS", {})


def decoder(name: str) -> StaticDecoder:
    torch.manual_seed(0)
    tokens = Tokens(60, 40, STEPS)
    return frozen_decoder(SHAPE, SCHEMES[name], tokens, BATCH, impl="reference")


def step(at: StaticDecoder, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(BATCH, heads, 1, SHAPE.head_dim, generator=generator)
        for heads in (SHAPE.q_heads, SHAPE.kv_heads, SHAPE.kv_heads)
    )
    begin(at)
    return torch.stack([at.attend(i, query, key, value, 0.3) for i in range(SHAPE.layers)])


@pytest.mark.parametrize("name", SCHEMES)
def test_no_later_step_leaves_memory_behind_or_asks_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = decoder(name)
    fresh_process(monkeypatch)
    at.flush()
    step(at, 0)
    with Allocations() as pool, NoQuestions() as watch:
        at.flush()
        step(at, 1)
    assert len(pool.made) > 20
    assert watch.seen > 20  # a flush and an attention, operation by operation
    assert pool.left() == 0


def test_the_first_step_leaves_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    at = decoder("rotated")
    fresh_process(monkeypatch)
    with Allocations() as pool:
        step(at, 0)
    assert pool.left() > 0


def test_a_question_shows() -> None:
    with NoQuestions(), pytest.raises(AssertionError, match="asks the host"):
        bool(torch.ones(1).any())


def test_a_decoder_makes_the_counters_that_launches_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_COUNTERS", {})
    at = decoder("kivi")
    given = (at.stores, at.tau)
    StaticDecoder(*given)
    assert not counters._COUNTERS  # no kernels, no counters
    monkeypatch.setattr(static, "has_kernels", lambda device: True)
    StaticDecoder(*given, impl="cuda")
    monkeypatch.setattr(counters, "kept", None)  # another allocation would raise
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    taken = [counters.counters(torch.device("cpu"), count) for count in (7, 5, counters.COUNTERS)]
    (first, zeros), (second, _), (around, _) = taken
    assert not zeros.any()
    assert (first, second, around) == (zeros.data_ptr(), first + 4 * 7, first)


def test_matrices_for_kernels_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_process(monkeypatch)
    given = ("hadamard", "back", 64, torch.device("cpu"))
    first = decode.kernel_matrices(*given)
    monkeypatch.setattr(rotate_queries, "kept", None)
    assert decode.kernel_matrices(*given) is first
