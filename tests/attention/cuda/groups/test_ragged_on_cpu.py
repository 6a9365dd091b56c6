"""Chunks of many requests by the kernels' own source on a CPU, byte for byte as torch has them."""

import pytest
import torch
from ragged_cases import HEADS, Batch

from duotone.attention.cuda.dense import ring_rows
from duotone.attention.cuda.groups import chunk_numbers, pack, unpack
from duotone.attention.cuda.groups.chunk_numbers import Pages
from duotone.attention.cuda.groups.pack import page_pack
from duotone.attention.cuda.shared import merge_into as merging
from duotone.attention.cuda.shared.merge_into import merge_into, merged_by_torch
from duotone.serve import ragged, windows
from duotone.serve.pages import PageLayout
from duotone.serve.windows import attention

from compile_cases import binary_of
from cuda_on_cpu import missing, run_on_cpu

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
LAYOUTS = [
    PageLayout(2, 64, torch.float16),
    PageLayout(4, 128, torch.bfloat16),
    PageLayout(4, 64, torch.bfloat16),
    PageLayout(2, 256, torch.float16),
]


@pytest.fixture
def kernels(monkeypatch, folder) -> None:
    for module in (chunk_numbers, pack, unpack, ring_rows, merging):
        run_on_cpu(module, monkeypatch, folder)
    monkeypatch.setattr(ragged, "has_kernels", lambda device: True)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_batch_equals_each_row_alone(layout, monkeypatch) -> None:
    monkeypatch.setattr(windows, "WINDOW", 128)
    batch = Batch(layout, dummy=(1, 5))
    (pool, out), (want_pool, want) = batch.together(attention), batch.alone()
    assert torch.equal(pool, want_pool)
    near = 2e-3 if layout.dtype == torch.float16 else 2e-2
    torch.testing.assert_close(out, want, rtol=near, atol=near)
    assert torch.equal(pool[0], batch.pool[0])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [64, 96, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_parts_are_merged_in_place(dtype, width) -> None:
    torch.manual_seed(0)
    sums, part = torch.randn(5, 3, width), torch.randn(5, 3, width).to(dtype)
    lse, part_lse = torch.randn(3, 9)[:, 2:7], torch.randn(3, 5) * 9
    lse[0, 1], part_lse[1, 2], part_lse[2, 3] = -torch.inf, torch.inf, -torch.inf
    sums[1, 0] = 0
    found, want = (sums.clone(), lse.clone()), (sums.clone(), lse.clone())
    merge_into(*found, part, part_lse)
    merged_by_torch(*want, part, part_lse)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y)
    assert torch.equal(found[0][2, 1], sums[2, 1])
    assert not torch.equal(found[0][0, 0], sums[0, 0])


@pytest.mark.slow
@pytest.mark.usefixtures("binaries")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_compile(arch, layout) -> None:
    paged = {"PAGED": layout.form.tiles, "ALIGN": 16, "NORM": 0}
    packs = pack.macros_of(layout.form, layout.spec, layout.dtype) | paged
    sizes = (layout.head_dim, layout.dtype)
    binary_of(pack.SOURCE, arch, packs)
    binary_of(unpack.SOURCE, arch, unpack.macros_of(layout.form, layout.dtype))
    binary_of(merging.SOURCE, arch, merging.macros_of(*sizes))
    pages = Pages(layout.tokens, layout.ring_rows, layout.rings, HEADS)
    binary_of(chunk_numbers.SOURCE, arch, chunk_numbers.macros_of(pages))
    for opening in (True, False):
        binary_of(ring_rows.SOURCE, arch, ring_rows.macros_of(*sizes, layout.ring_rows, opening))


def test_pages_that_do_not_fit_are_refused() -> None:
    layout = PageLayout(2, 128, torch.bfloat16)
    states = torch.zeros(2, 1, HEADS, 64, 128, dtype=torch.bfloat16)
    pool = torch.zeros(3, HEADS, layout.nbytes, dtype=torch.uint8)
    index = torch.zeros(1, 64, dtype=torch.long)
    for pages in (torch.zeros(2), torch.zeros(1).int()):
        with pytest.raises(ValueError, match="for each of the int32 pages"):
            page_pack(*states, index, pages, layout.form, layout.spec, pool)
