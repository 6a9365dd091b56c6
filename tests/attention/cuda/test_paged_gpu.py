"""Records in pages of a pool, on a real GPU: the same results as records in one piece."""

from dataclasses import replace

import pytest
import torch
from cuda_device import NEEDS_KERNELS
from torch import Tensor

from duotone.attention.cuda.groups import decode as group_decode
from duotone.attention.cuda.groups.records import GroupLayout, GroupRecords
from duotone.attention.cuda.shared.geometry import Geometry
from duotone.attention.cuda.shared.launch import run
from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import span_layout
from duotone.cache.pair import PackedPair
from duotone.quant import TensorSpec

from cases import INNERQ_KEY, INNERQ_VALUE, POISON_BYTE, Case, assert_near, build, reference

pytestmark = NEEDS_KERNELS
BF16, FP16 = torch.bfloat16, torch.float16
ODD = (3329, 111, 100, 63, 1)
TAU = (0.0, 3.0)


def paged(data: Tensor, counts: list[int], per_page: int) -> tuple[Tensor, Tensor]:
    """(pool, pages) of records: shuffled, what is not used poisoned."""
    needed = [-(-count // per_page) for count in counts]
    order = torch.randperm(sum(needed) + 3).tolist()
    shape = (len(order), data.shape[1], per_page, data.shape[3])
    pool = torch.full(shape, POISON_BYTE, dtype=torch.uint8, device=data.device)
    pages = torch.full((len(counts), max(needed) + 2), -1, dtype=torch.int32, device=data.device)
    for sequence, count in enumerate(counts):
        for i in range(needed[sequence]):
            page = order.pop()
            records = data[sequence, :, i * per_page : min(count, (i + 1) * per_page)]
            pool[page, :, : records.shape[1]] = records
            pages[sequence, i] = page
    return pool, pages


def group_case(lengths=ODD, gqa: int = 4, head_dim: int = 128, **kv_heads) -> Case:
    shape = {"gqa": gqa, "head_dim": head_dim, "dtype": BF16, **kv_heads}
    return Case(lengths, INNERQ_KEY, INNERQ_VALUE, **shape)


@pytest.mark.parametrize("per_page", [1, 3, 8])
@pytest.mark.parametrize(
    "case",
    [
        *(group_case(gqa=gqa, kv_heads=2) for gqa in (1, 4, 6, 7)),
        Case(ODD, TensorSpec(2, "tokens", 32), TensorSpec(2, "channels", 32), dtype=FP16),
        group_case((20_000,)),
        group_case((100,) * 40, kv_heads=8),
        group_case((100, 1, 300) * 30, kv_heads=8),
    ],
    ids=str,
)
def test_streams_in_pages(case: Case, per_page: int) -> None:
    query, kv = build(case)
    pair = PackedPair(kv[0].key, kv[0].value).laid_out(GroupLayout())
    form, data = pair.records.format, pair.records.data
    pool, pages = paged(data, [-(-n // form.tokens) for n in case.lengths], per_page)
    whole, out = (torch.full_like(query, torch.nan) for _ in range(2))
    whole_stream, stream = (replace(kv[0], records=GroupRecords(form, x)) for x in (data, pool))
    run([group_decode.group_task(query, whole_stream)], case.sm_scale, whole)
    run([group_decode.group_task(query, stream, pages=pages)], case.sm_scale, out)
    assert_near(out, whole)
    assert_near(out, reference(case, query, kv))


@pytest.mark.parametrize("per_page", [1, 3, 8])
@pytest.mark.parametrize("tau", [None, TAU], ids=["plain", "tau"])
@pytest.mark.parametrize(
    "shape",
    [
        *({"gqa": gqa, "kv_heads": 2} for gqa in (1, 4, 6, 7)),
        {"lengths": (3329, 700), "spans": 3},
        {"lengths": (20_000,)},
        {"lengths": (300, 97) * 40, "kv_heads": 8},
    ],
    ids=str,
)
def test_spans_in_pages(shape: dict, tau, per_page: int) -> None:
    check_spans(
        Case(**{"lengths": ODD, "head_dim": 128, "dtype": BF16, "tau": tau, **shape}), per_page
    )


@pytest.mark.parametrize("at", [Geometry(8, 2, 1, 2), Geometry(4, 4, 3, 4)])
def test_sub_blocks_find_the_pages_of_their_kv_heads(at, monkeypatch) -> None:
    monkeypatch.setattr(span_decode, "geometry", lambda *_: at)
    check_spans(Case(ODD, head_dim=64, kv_heads=4, dtype=BF16), per_page=3)


def check_spans(case: Case, per_page: int) -> None:
    """Records in pages give what those in one piece do, and the reference."""
    query, kv = build(case)
    pair = PackedPair(kv[0].key, kv[0].value).laid_out(span_layout)
    records, key = pair.records, pair.key
    counts = (-(-key.blocks.sizes // records.format.tokens)).sum(-1).tolist()
    pool, pages = paged(records.data, counts, per_page)
    whole, out = (torch.full_like(query, torch.nan) for _ in range(2))
    segment = replace(kv[0], key=key, value=pair.value, records=records)
    in_pages = replace(segment, records=replace(records, data=pool))
    run([span_decode.span_task(query, segment, case.tau)], case.sm_scale, whole)
    run([span_decode.span_task(query, in_pages, case.tau, pages)], case.sm_scale, out)
    assert_near(out, whole)
    assert_near(out, reference(case, query, kv))
