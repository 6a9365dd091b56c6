"""Rings, splits, tickets and launches that merge give the mean of all records."""

import ctypes

import pytest
import torch

from duotone.attention.cuda.groups.decode import Arguments, Codes
from duotone.attention.cuda.shared.launch import MERGE_WARPS
from duotone.attention.cuda.shared.work import Call, inverse_of

from cuda_on_cpu import missing
from units_on_cpu import CHANNELS, KERNEL, KEYS, PACKED_TILE_BYTES, WARPS, compiled

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
GROUP, KV_HEADS = 3, 2
# Tokens of each sequence: no record, one that is not full, one for each warp, and more.
LENGTHS = torch.tensor([0, 3, 4, 8, 0, 41, 5, 23, 90, 0])
# Architecture (bulk copies, copies by lanes), slots of a ring, copies as late as they may happen,
# and how many are under way where the record before is read between taking one and asking for one
# (0: one is, and nothing is read between).
RINGS = [
    (900, 2, 1, 0), (900, 3, 1, 0), (900, 3, 0, 0), (800, 3, 1, 0),
    (900, 3, 1, 1), (800, 3, 0, 1), (900, 3, 1, 2), (800, 3, 1, 2), (900, 3, 0, 2), (900, 5, 1, 4),
    (800, 3, 0, 2),
]  # fmt: skip
# Packed tiles that are loaded before lengths are known, by sub-blocks of two sizes, in pages.
EARLY = [
    pytest.param(*ring, merge, blocks, paged, id="-".join(map(str, (*ring, way, blocks, paged))))
    for *ring, blocks, paged in (
        (900, 3, 1, 1, 1, 0), (900, 3, 0, 2, 2, 0), (900, 3, 1, 2, 2, 0), (900, 3, 1, 1, 2, 3),
        (800, 3, 0, 2, 2, 0),
    )
    for way, merge in {"one part": 0, "tickets": 1}.items()
]  # fmt: skip


def macros(arch: int, stages: int, **more: int) -> dict[str, int]:
    return {
        "__CUDA_ARCH__": arch, "STAGES": stages, "CHANNELS": CHANNELS, "KEYS": KEYS, "G": GROUP,
        "PACKED_TILE_BYTES": PACKED_TILE_BYTES, "WARPS": WARPS, "PAGED": 0, "QUERY": 2, "OUT": 2,
        "OVERLAP": 0, "MERGE": 0, "LATE": 0, "BETWEEN": 0, "IN_FLIGHT": 1, "EARLY": 0,
        "SUB_BLOCKS": 1, "K_SEPARATE_BYTES": 0, "V_SEPARATE_BYTES": 0,
        "ARGUMENTS_BYTES": ctypes.sizeof(Call), **more,
    }  # fmt: skip


def pieces(data: torch.Tensor, apart: tuple[int, int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(records [heads, records, keys, channels] without the keys apart, those with room behind)."""
    kept, *parts = data.split([KEYS - sum(apart), *apart], 2)
    room = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 2), value=torch.nan) for x in parts]
    return kept.contiguous(), [x.contiguous() for x in room]


def codes(part: torch.Tensor) -> Codes:
    return Codes(part.data_ptr(), part[0].nbytes)


# Keys of a record that lie apart, as codes of K and of V: two pieces, or three.
PIECES = {"k": (1, 0), "v": (0, 2), "k and v": (2, 1)}
MERGES = {"one part": 0, "tickets": 1, "launch": 2}
WAYS = {name: (merge, (0, 0)) for name, merge in MERGES.items()}
WAYS |= {f"{name} apart": (1, keys) for name, keys in PIECES.items()}
CASES = [
    pytest.param(*ring, *way, id="-".join((*map(str, ring), name)))
    for ring in RINGS
    for name, way in WAYS.items()
    if ring[3] in (0, 2) or way[1] == (0, 0)  # streams have two records under way
]


@pytest.mark.parametrize(("arch", "stages", "late", "between", "merge", "apart"), CASES)
def test_every_unit_is_done_once(arch, stages, late, between, merge, apart, folder) -> None:
    row = PACKED_TILE_BYTES // KEYS
    more = {"PACKED_TILE_BYTES": row * (KEYS - sum(apart)), "MERGE": merge}
    more |= {"LATE": late, "BETWEEN": between, "IN_FLIGHT": between or 1}
    if any(apart):
        more |= {"K_SEPARATE_BYTES": row * apart[0], "V_SEPARATE_BYTES": row * apart[1]}
        more["ARGUMENTS_BYTES"] = ctypes.sizeof(Arguments)
    check_units(macros(arch, stages, **more), apart, folder)


@pytest.mark.parametrize(
    ("arch", "stages", "late", "between", "merge", "sub_blocks", "paged"), EARLY
)
def test_tiles_may_be_loaded_early_by_sub_blocks(
    arch, stages, late, between, merge, sub_blocks, paged, folder
) -> None:
    more = {"MERGE": merge, "LATE": late, "BETWEEN": between, "IN_FLIGHT": between, "EARLY": 1}
    more |= {"SUB_BLOCKS": sub_blocks, "WARPS": 4 if sub_blocks > 1 else WARPS, "PAGED": paged}
    check_units(macros(arch, stages, **more), (0, 0), folder)


def in_pages(records: torch.Tensor, per_page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(a pool of pages [pages, kv_heads, per_page, ...], in some order, and where they are)."""
    of_sequences = records.view(len(LENGTHS), KV_HEADS, *records.shape[1:])
    pages = torch.nn.functional.pad(of_sequences, (0, 0) * 2 + (0, -records.shape[1] % per_page))
    pages = pages.unflatten(2, (-1, per_page)).transpose(1, 2).flatten(0, 1)
    order = torch.randperm(len(pages))
    pool = torch.empty_like(pages).index_copy_(0, order, pages)
    return pool.contiguous(), order.view(len(LENGTHS), -1).int().contiguous()


def check_units(all_macros: dict[str, int], apart: tuple[int, int], folder) -> torch.Tensor:
    """The output, and lse beside it; all records of all sequences are in it, once."""
    torch.manual_seed(0)
    merge, warps, sub_blocks = (all_macros[name] for name in ("MERGE", "WARPS", "SUB_BLOCKS"))
    # With tickets more parts than a block merges at once.
    heads, splits = len(LENGTHS) * KV_HEADS, (1, 19, 3)[merge]
    records = -(-int(LENGTHS.max()) // KEYS)
    data = torch.randn(heads, records * KEYS, CHANNELS)
    query = torch.randn(heads * GROUP, CHANNELS)
    there = torch.arange(records * KEYS) < LENGTHS.repeat_interleave(KV_HEADS)[:, None]
    mean = (data * there[..., None]).sum(1) / there.sum(1).clamp_min(1)[:, None]
    factor = query[::GROUP, 0, None] * torch.arange(1, GROUP + 1)
    expected = (mean[:, None] * factor[..., None]).flatten(0, 1)
    rows = heads * splits * GROUP
    out, lse = torch.full((heads * GROUP, CHANNELS), torch.nan), torch.empty(heads * GROUP)
    partial, weights = torch.full((rows, CHANNELS), torch.nan), torch.full((rows, 2), torch.nan)
    counters = torch.zeros(heads, 2, dtype=torch.int32)
    kept, parts = pieces(data.view(heads, records, KEYS, CHANNELS), apart)
    table = torch.empty(0, 0)
    if all_macros["PAGED"]:
        kept, table = in_pages(kept, all_macros["PAGED"])
    given = Arguments(
        query=query.data_ptr(), packed_tiles=kept.data_ptr(), tokens=LENGTHS.data_ptr(),
        partial=partial.data_ptr(), weights=weights.data_ptr(), counters=counters.data_ptr(),
        out=out.data_ptr(), lse=lse.data_ptr(), out_stride=CHANNELS, lse_stride=1,
        kv_heads=KV_HEADS, blocks=1, packed_tiles_per_head=records, splits=splits,
        splits_inverse=inverse_of(splits), all_parts=splits, units=heads * splits, sm_scale=1.0,
        pages=table.data_ptr(), pages_per_sequence=table.shape[1], key=codes(parts[0]),
        value=codes(parts[1]),
    )  # fmt: skip
    add = compiled("add_packed_tiles", all_macros, folder)
    add(given, (splits, KV_HEADS // sub_blocks, len(LENGTHS)), sub_blocks * warps * 32)
    if merge == 2:
        given.units = heads
        run = compiled("merge_parts", all_macros | {"OVERLAP": 2, "WARPS": MERGE_WARPS}, folder)
        run(given, -(-heads * GROUP // MERGE_WARPS), MERGE_WARPS * 32)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    tokens = LENGTHS.repeat_interleave(KV_HEADS * GROUP)
    torch.testing.assert_close(lse, tokens.float().log2(), rtol=1e-4, atol=1e-4)
    assert not counters.any()
    return torch.cat([out, lse[:, None]], 1)


# (macros, whether the order in which blocks and warps arrive may matter). A part of 19 has no more
# records than warps, and nothing is drawn.
ORDERS = {
    "drawn": ({"MERGE": 0}, True),
    "tickets": ({"MERGE": 1}, False),
    "in turn": ({"MERGE": 0, "IN_TURN": 1, "IN_FLIGHT": 2, "BETWEEN": 2}, False),
    "in turn, sub-blocks": (
        {"MERGE": 0, "IN_TURN": 1, "EARLY": 1, "SUB_BLOCKS": 2, "WARPS": 4},
        False,
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_bits_do_not_depend_on_who_comes_first(name: str, folder, monkeypatch) -> None:
    more, may_differ = ORDERS[name]
    forwards = check_units(macros(900, 3, **more), (0, 0), folder)
    monkeypatch.setenv("BACKWARDS", "1")
    backwards = check_units(macros(900, 3, **more), (0, 0), folder)
    assert torch.equal(forwards, backwards) != may_differ


def test_threads_that_wait_for_each_other_are_noticed(folder) -> None:
    one_warp_leaves = KERNEL.replace("begin();", "if (threadIdx.x < 32) return;", 1)
    query = torch.randn(GROUP, CHANNELS)
    given = Arguments(
        query=query.data_ptr(), tokens=LENGTHS.data_ptr(), kv_heads=KV_HEADS, blocks=1, splits=1
    )
    run = compiled("add_packed_tiles", macros(900, 3), folder, one_warp_leaves)
    with pytest.raises(AssertionError, match="wait for each other"):
        run(given, (1, 1, 1), WARPS * 32)


@pytest.mark.parametrize("earlier", [(1,), (2, 3)], ids=["one part", "five parts"])
def test_the_last_launch_merges_what_others_left(earlier, folder) -> None:
    torch.manual_seed(0)
    heads, parts = len(LENGTHS) * KV_HEADS, sum(earlier) + 1
    query = torch.randn(heads * GROUP, CHANNELS)
    rows = heads * parts * GROUP
    out, lse = torch.full((heads * GROUP, CHANNELS), torch.nan), torch.empty(heads * GROUP)
    partial, weights = torch.full((rows, CHANNELS), torch.nan), torch.full((rows, 2), torch.nan)
    sums, count, first = torch.zeros(heads, CHANNELS), torch.zeros(heads, 1), 0
    # Each launch has other tokens; the first one has some of every sequence.
    for number, splits in enumerate((*earlier, 1)):
        lengths = (LENGTHS.roll(number) if number else LENGTHS * 0 + 7).contiguous()
        records = -(-int(lengths.max()) // KEYS)
        data = torch.randn(heads, records * KEYS, CHANNELS)
        there = torch.arange(records * KEYS) < lengths.repeat_interleave(KV_HEADS)[:, None]
        sums, count = sums + (data * there[..., None]).sum(1), count + there.sum(1, keepdim=True)
        given = Arguments(
            query=query.data_ptr(), packed_tiles=data.data_ptr(), tokens=lengths.data_ptr(),
            partial=partial.data_ptr(), weights=weights.data_ptr(), out=out.data_ptr(),
            lse=lse.data_ptr(), out_stride=CHANNELS, lse_stride=1, kv_heads=KV_HEADS, blocks=1,
            packed_tiles_per_head=records, splits=splits, splits_inverse=inverse_of(splits),
            first_part=first, all_parts=parts,
            units=heads * splits, sm_scale=1.0,
        )  # fmt: skip
        merge = 3 if first + splits == parts else 2
        add = compiled("add_packed_tiles", macros(900, 3, MERGE=merge), folder)
        add(given, (splits, KV_HEADS, len(LENGTHS)), WARPS * 32)
        first += splits
    factor = query[::GROUP, 0, None] * torch.arange(1, GROUP + 1)
    expected = ((sums / count)[:, None] * factor[..., None]).flatten(0, 1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    tokens = count.flatten().repeat_interleave(GROUP)
    torch.testing.assert_close(lse, tokens.log2(), rtol=1e-4, atol=1e-4)
