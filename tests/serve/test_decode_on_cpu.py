"""Sources of a decode step's two launches on a CPU, against plain torch."""

from pathlib import Path

import pytest
import torch
from lanes_on_cpu import LANES, PRODUCTS
from steps import HEADS, StepCase

from duotone.attention.cuda.groups import append
from duotone.attention.cuda.groups import decode as group_decode
from duotone.attention.cuda.shared import launch, runtime
from duotone.attention.cuda.shared.geometry import Geometry
from duotone.serve import short
from duotone.serve.pages import PageLayout, write_pages
from duotone.serve.short import ShortChunks

from cuda_on_cpu import missing, own_counters, run_on_cpu
from units_on_cpu import ASSEMBLY, compiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
FP16, BF16, CPU = torch.float16, torch.bfloat16, torch.device("cpu")
HALVES = """
static u32 of_halves(u32 a, u32 b, u32 c) {
  u32 y = 0;
  for (int i = 0; i < 32; i += 16)
    y |= (u32)bits_of(fmaf(number_of(a >> i), number_of(b >> i), number_of(c >> i))) << i;
  return y;
}
"""
INSTRUCTIONS = PRODUCTS | {
    "fma.rn.f16x2": "d = of_halves(a, b, c);",
    "mul.rn.f16x2": "d = of_halves(a, b, 0);",
    "cvt.rn.f16x2.f32": "d = bits_of(low) | (u32)bits_of(high) << 16;",
    "(out[4 * i])": "memcpy(out + 4 * i, at_shared(base + i * 512 + lane * 16), 16);",
    "(out[2 * i])": "memcpy(out + 2 * i, at_shared(base + i * 256 + lane * 8), 8);",
    "(out[i])": "memcpy(out + i, at_shared(base + i * 128 + lane * 4), 4);",
    "(first)": "memcpy(&first, at_shared(params), 4);",
    "(levels[0].step)": "memcpy(&levels[0].step, at_shared(from), 4);"
    "memcpy(&levels[1].step, at_shared(from + 4), 4); memcpy(zero, at_shared(from + 8), 8);",
}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the launches of a step run here, in two warps of two splits."""

    def kernel(source, name, macros, device):
        extra = {"KV": 0, "LATE": 0, "__CUDA_ARCH__": 900}
        text = runtime.source_text(source).replace(runtime.source_text("groups/along_k.cuh"), "")
        text = LANES + HALVES + text.replace("__align__(8)", "")
        run = compiled(name, dict(macros) | extra, tmp_path, text, INSTRUCTIONS | ASSEMBLY)
        return lambda at, given: run(given, at.blocks, at.threads)

    run_on_cpu(append, monkeypatch, tmp_path)
    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "counters", own_counters)
    for module in (launch, group_decode):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(group_decode, "geometry", lambda *_: Geometry(2, 1, 2))


@pytest.mark.parametrize(
    ("layout", "gqa"),
    [
        (PageLayout(2, 128, BF16), 4),
        (PageLayout(2, 64, FP16), 1),
        (PageLayout(4, 64, BF16), 6),
        (PageLayout(2, 256, BF16), 8),
        (PageLayout(4, 128, FP16), 7),
    ],
    ids=str,
)
@pytest.mark.usefixtures("on_cpu")
def test_a_step_is_that_of_plain_torch(layout: PageLayout, gqa: int) -> None:
    page = layout.tokens
    case = StepCase(layout, [1, page - 1, page, 2 * page, 2 * page + 20], gqa, CPU)
    ours, theirs = case.appended()
    # The pages of the two that are full, and rows of all.
    assert (ours != case.pool).flatten(1).any(1).sum() == 2 + 5
    assert torch.equal(ours, theirs)
    apart = torch.cat([case.states[0].float(), torch.full((7, 3, layout.head_dim), torch.nan)], 1)
    out, wanted = case.attended(ours, apart[:, : gqa * HEADS])
    # Plain torch rounds packed tokens to the type of K and V.
    torch.testing.assert_close(out, wanted, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    "layout", [PageLayout(2, 128, BF16), PageLayout(4, 96, FP16), PageLayout(2, 32, FP16)], ids=str
)
@pytest.mark.usefixtures("on_cpu")
def test_all_warps_of_a_page_find_that_one_has_large_scales(layout: PageLayout) -> None:
    case = StepCase(layout, [layout.tokens, 2 * layout.tokens], 1, CPU, loud=3000.0)
    ours, theirs = case.appended()
    assert torch.equal(ours, theirs)
    quiet = StepCase(layout, [layout.tokens, 2 * layout.tokens], 1, CPU)
    assert not torch.equal(quiet.appended()[0], ours)


@pytest.mark.parametrize(
    ("layout", "gqa"), [(PageLayout(2, 64, FP16), 6), (PageLayout(4, 128, BF16), 4)], ids=str
)
@pytest.mark.usefixtures("on_cpu")
def test_short_chunks_are_those_of_plain_torch(
    layout: PageLayout, gqa: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    pool = torch.full((9, 2, layout.tokens, layout.token_bytes), 0xFF, dtype=torch.uint8)
    table = torch.tensor([[3, 1, 7, 0], [5, 2, 0, 0], [8, 0, 0, 0]], dtype=torch.int32)
    for row, past in enumerate((3, 2)):
        drawn = torch.randn(2, past * layout.tokens, 2, layout.head_dim).to(layout.dtype)
        write_pages(layout, pool, table[row, :past], *drawn)
    chunks = ShortChunks(layout, gqa, [5, 3, 1], [3, 2, 0], [0, 1, 2], table)
    query = torch.randn(9, 2 * gqa, layout.head_dim)
    wanted = chunks.attend(pool, query, 0.1)
    monkeypatch.setattr(short, "has_kernels", lambda device: True)
    for x, y in zip(chunks.attend(pool, query, 0.1), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=4e-3, atol=4e-3)
    assert (wanted[1][:, 8] == -torch.inf).all()
