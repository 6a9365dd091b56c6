"""Pages dequantized by the kernel's own source on a CPU, bit for bit as torch has them."""

from dataclasses import replace

import pytest
import torch
from group_specs import CASES
from unpacked import as_on_a_gpu, assert_unpacked, needs_compiler, segment_of

from duotone.attention.cuda.groups import unpack
from duotone.attention.cuda.groups.records import GroupLayout
from duotone.attention.refused import RefusedError
from duotone.attention.unpack import by_kernel
from duotone.cache import BlockTable, pack_tensor
from duotone.cache.pair import PackedPair
from duotone.serve.pages import PageLayout, read_pages, write_pages

from cases import states
from cuda_on_cpu import run_on_cpu

HEADS, PAGES = 2, [3, 0, 4, 3]
LAYOUTS = [
    PageLayout(2, 64, torch.float16),
    PageLayout(4, 128, torch.bfloat16),
    PageLayout(2, 128, torch.float32),
    PageLayout(4, 256, torch.bfloat16),
    PageLayout(2, 96, torch.bfloat16),
]


def filled(layout: PageLayout, largest: float = 1.0) -> torch.Tensor:
    torch.manual_seed(0)
    pool = torch.full((5, HEADS, layout.tokens, layout.token_bytes), 255, dtype=torch.uint8)
    drawn = torch.randn(2, 3 * layout.tokens, HEADS, layout.head_dim) * largest
    write_pages(layout, pool, torch.tensor([3, 0, 4]), *drawn.to(layout.dtype))
    return pool


@needs_compiler
# 1,000: scales too large for steps.
@pytest.mark.parametrize("largest", [1.0, 1000.0])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pages_are_as_torch_has_them(layout, largest, monkeypatch, folder) -> None:
    run_on_cpu(unpack, monkeypatch, folder)
    pool, pages = filled(layout, largest), torch.tensor(PAGES, dtype=torch.int32)
    want = read_pages(layout, pool, pages)
    got = [torch.full_like(x, torch.nan, memory_format=torch.contiguous_format) for x in want]
    unpack.group_unpack(layout.form, layout.records(pool), pages, *got)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert not torch.equal(got[0][: layout.tokens], got[0][layout.tokens : 2 * layout.tokens])


def test_what_does_not_fit_is_refused() -> None:
    form = PageLayout(2, 64, torch.float16).form
    pool, pages = torch.zeros(2, 1, form.nbytes, dtype=torch.uint8), torch.zeros(1).int()
    dense = torch.zeros(form.tokens, 1, 64)
    for given in (
        (pool, pages, dense, dense[1:]),
        (pool, pages.long(), dense, dense),
        (pool[..., 1:], pages, dense, dense),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            unpack.group_unpack(form, *given)
    with pytest.raises(RefusedError, match="multiple of 8"):
        unpack.check(replace(form, head_dim=60), torch.float16)
    with pytest.raises(RefusedError, match="float64"):
        unpack.check(form, torch.float64)


def stream(name: str, head_dim: int, dtype: torch.dtype) -> PackedPair:
    """Sequences of whole tiles, without any, and with a tile that is not full."""
    torch.manual_seed(0)
    table = BlockTable(torch.tensor([[0, n] for n in (150, 0, 96)]))
    x = states(3, 2, 150, head_dim).to(dtype)
    return PackedPair(*(pack_tensor(x, spec, table) for spec in CASES[name]))


@needs_compiler
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16), (64, torch.float32)]
)
@pytest.mark.parametrize("name", CASES)
def test_streams_are_as_torch_has_them(name, head_dim, dtype, monkeypatch, folder) -> None:
    run_on_cpu(unpack, monkeypatch, folder)
    as_on_a_gpu(monkeypatch)
    pair = stream(name, head_dim, dtype)
    laid, own = segment_of(pair.laid_out(GroupLayout())), segment_of(pair)
    assert_unpacked(laid, of=own)
    wrong = replace(laid.records, data=laid.records.data ^ 1)
    with pytest.raises(AssertionError):
        assert_unpacked(replace(laid, records=wrong), of=own)


@needs_compiler
@pytest.mark.parametrize("lends", [("key",), ("value",), ("key", "value")], ids=str)
@pytest.mark.parametrize("name", ["kivi", "kivi1", "inner", "k-kivi-v-inner"])
def test_codes_that_layers_share(name, lends, monkeypatch, folder) -> None:
    """A layer that reads another's codes has scales of its own; the other may have more tokens."""
    run_on_cpu(unpack, monkeypatch, folder)
    as_on_a_gpu(monkeypatch)
    pair = stream(name, 64, torch.bfloat16)
    lender = pair.laid_out(GroupLayout(lends=frozenset(lends)))
    assert_unpacked(segment_of(lender), of=segment_of(pair))
    own = PackedPair(*(replace(x, scale=3 * x.scale) for x in (pair.key, pair.value)))
    reader = own.without_codes(lends).laid_out(GroupLayout(borrows=frozenset(lends)))
    records = reader.records
    assert records is not None
    assert by_kernel(segment_of(reader)) is None  # its codes are missing
    for which in lends:
        records = records.with_codes(which, lender.records.widened(512))
    assert_unpacked(segment_of(replace(reader, records=records)), of=segment_of(own))
