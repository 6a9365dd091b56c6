"""Pages and rings of a served cache: packed as the cache in memory packs, whatever the chunks."""

import pytest
import torch
from torch import Tensor

from duotone.attention.refused import RefusedError
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.packing import pack_tensor
from duotone.quant import TensorSpec
from duotone.serve.pages import (
    Chunk,
    PageLayout,
    read_pages,
    read_ring,
    served_spec,
    write_pages,
    write_ring,
)

HEADS, Q_HEADS = 2, 6
POISON = 255


def made(layout: PageLayout, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (Q_HEADS, HEADS, HEADS)
    return tuple(
        torch.randn(tokens, n, layout.head_dim, generator=generator).to(layout.dtype) for n in sizes
    )


class Request:
    """A request in a pool that other requests have filled with NaN."""

    def __init__(self, layout: PageLayout, tokens: int) -> None:
        self.layout, pages = layout, -(-tokens // layout.tokens)
        shape = (pages + layout.rings + 3, HEADS, layout.tokens, layout.token_bytes)
        self.pool = torch.full(shape, POISON, dtype=torch.uint8)
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))
        self.pages, self.blocks = order[:pages], order[pages : pages + layout.rings]
        self.context = 0

    def step(self, states: tuple[Tensor, Tensor, Tensor], stored: bool = True) -> Tensor:
        given = (self.pages, self.blocks, states, self.context, stored)
        chunk = Chunk(self.layout, self.pool, *given)
        chunk.open()
        chunk.keep()
        out = chunk.attend(self.layout.head_dim**-0.5)
        self.context += len(states[0]) * stored
        return out


def layouts() -> list[PageLayout]:
    return [
        PageLayout(bits, d, dtype)
        for bits in (2, 4)
        for d in (64, 128, 256)
        for dtype in (torch.float32, torch.bfloat16)
    ]


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_rings_hold_a_page_and_drafts(layout: PageLayout) -> None:
    assert layout.ring_tokens >= layout.tokens + 4
    assert layout.token_bytes * layout.tokens == layout.nbytes
    # KIVI's bits: codes of K and V, and a scale and a zero-point of 16 bits for each 32.
    assert layout.token_bytes * 8 / (2 * layout.head_dim) == layout.bits + 1


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_hold_what_the_cache_in_memory_holds(bits: int, head_dim: int) -> None:
    layout = PageLayout(bits, head_dim, torch.float16)
    tokens = 3 * layout.tokens
    _, key, value = made(layout, tokens)
    pool = torch.full((5, HEADS, layout.tokens, layout.token_bytes), POISON, dtype=torch.uint8)
    pages = torch.tensor([3, 0, 4])
    write_pages(layout, pool, pages, key, value)
    both = zip((key, value), (layout.spec.key, layout.spec.value), strict=True)
    want = [
        _packed(x.transpose(0, 1)[None], spec).dequantize()[0].transpose(0, 1) for x, spec in both
    ]
    for x, y in zip(read_pages(layout, pool, pages), want, strict=True):
        assert torch.equal(x, y)
    assert (pool[[1, 2]] == POISON).all()


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_a_ring_returns_what_it_was_given(layout: PageLayout) -> None:
    request = Request(layout, 1)
    _, key, value = made(layout, layout.tokens)
    first = 5 * layout.tokens
    write_ring(layout, request.pool, request.blocks, first, key, value)
    found = read_ring(layout, request.pool, request.blocks, first, first + layout.tokens)
    assert torch.equal(found[0], key)
    assert torch.equal(found[1], value)


@pytest.mark.parametrize("chunks", [(1,) * 100, (31, 2, 67), (32, 32, 36), (100,), (70, 1, 29)])
def test_chunks_leave_equal_pages(chunks: tuple[int, ...]) -> None:
    layout = PageLayout(2, 128, torch.bfloat16)
    states, tokens = made(layout, 100), 100
    one, many = Request(layout, tokens), Request(layout, tokens)
    one.step(states)
    outs = [many.step(tuple(x[a:b] for x in states)) for a, b in _borders(chunks)]
    whole = tokens // layout.tokens
    assert torch.equal(one.pool[one.pages[:whole]], many.pool[many.pages[:whole]])
    rest = whole * layout.tokens
    for x, y in zip(
        *(read_ring(layout, r.pool, r.blocks, rest, tokens) for r in (one, many)), strict=True
    ):
        assert torch.equal(x, y)
    assert all(bool(x.isfinite().all()) for x in outs)


@pytest.mark.parametrize("context", [0, 1, 31, 32, 33, 64, 95])
def test_a_step_attends_to_pages_ring_and_own_tokens(context: int) -> None:
    layout = PageLayout(4, 64, torch.float32)
    request = Request(layout, 128)
    past, new = made(layout, context), made(layout, 7, seed=3)
    if context:
        request.step(past)
    got = request.step(new)
    whole = context // layout.tokens * layout.tokens
    packed = read_pages(layout, request.pool, request.pages[: whole // layout.tokens])
    keys, values = (
        torch.cat([p[:whole], x[whole:], y]).double()
        for p, x, y in zip(packed, past[1:], new[1:], strict=True)
    )
    each = Q_HEADS // HEADS
    scores = torch.einsum("qhd,nhd->hqn", new[0].double(), keys.repeat_interleave(each, 1))
    scores = scores * layout.head_dim**-0.5
    scores += torch.full_like(scores, -torch.inf).triu(context + 1)
    want = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values.repeat_interleave(each, 1))
    assert torch.allclose(got.double(), want, atol=1e-5)


def test_rows_without_slots_write_nothing() -> None:
    layout = PageLayout(2, 128, torch.bfloat16)
    request = Request(layout, 64)
    request.step(made(layout, 33))
    before = request.pool.clone()
    request.step(made(layout, 40, seed=2), stored=False)
    assert torch.equal(request.pool, before)


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 4\] bits; got 3"):
        served_spec(3)
    with pytest.raises(RefusedError, match="head_dim"):
        _ = PageLayout(2, 512, torch.bfloat16).form


def _packed(x: Tensor, spec: TensorSpec) -> PackedTensor:
    spans = BlockTable.uniform(1, x.shape[2], x.shape[2], x.device)
    return pack_tensor(x, spec, spans)


def _borders(chunks: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = [sum(chunks[: i + 1]) for i in range(len(chunks))]
    return list(zip([0, *ends[:-1]], ends, strict=True))
