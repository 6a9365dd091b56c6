"""The Triton path against the reference: in the interpreter where there is no GPU, else on it."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from duotone.attention import attend, decode_attention
from duotone.cache import BlockTable, DenseSegment, pack_tensor
from duotone.quant import KVSpec, TensorSpec, scheme, unpack

from cases import (
    CLASSES_KEY,
    CLASSES_VALUE,
    INNERQ_KEY,
    INNERQ_VALUE,
    PRESET_KEY,
    ROTATED_KEY,
    ROTATED_VALUE,
    SMALL,
    SMALL_TILES,
    Case,
    assert_near,
    build,
    build_from_store,
    cut,
    device,
    poisoned,
    reference,
    states,
)

pytest.importorskip("triton", reason="the Triton path needs triton")

import triton
import triton.language as tl

from duotone.attention.triton.decode import channel_order, decode_attention_triton, split_count
from duotone.attention.triton.family import first_refusal
from duotone.attention.triton.operands import loop_tiles, tile_config
from duotone.attention.triton.walk import find_block

HYBRID, SYMMETRIC = (TensorSpec(2, mapping=mapping) for mapping in ("hybrid", "symmetric"))
SMALL_2 = TensorSpec(2, param_dtype="float8")
HYBRID_64, SYMMETRIC_32 = HYBRID.replace(group=64), SYMMETRIC.replace(bits=4, group=32)
# bf16 queries are left to the GPU: the interpreter truncates where bf16 hardware rounds.
CASES = [
    Case((100, 63), dtype=torch.float16, dense=(5, 40)),
    Case((1, 150), TensorSpec(2), TensorSpec(1), gqa=6, head_dim=80, mask=True, tau=(0.0, 3.0)),
    Case((300, 30), TensorSpec(2, group=32), TensorSpec(2, "channels", 32), gqa=1, kv_heads=2),
    Case((70, 99), TensorSpec(4, "channels"), TensorSpec(4, "channels"), gqa=7, head_dim=96),
    Case((33, 40), TensorSpec(2, group=32), TensorSpec(2, "channels", 32), head_dim=512,
         dense=(9, 4)),
    Case((33, 64), TensorSpec(8), TensorSpec(4), value_dim=96, tau=(1.0, 2.0), dtype=torch.float32),
    Case((80, 17), TensorSpec(1, "channels", 6), TensorSpec(2, "channels", 12), tau=(0.0, 3.0)),
    Case((90, 40), TensorSpec(1, "span"), TensorSpec(1, "span", 40), spans=3),
    Case((64, 31), TensorSpec(2, group=24), TensorSpec(1, group=17), spans=2, dtype=torch.float32),
    # Unequal channels: in K, in V, in both; several blocks, whole spans, bytes that are filled up.
    Case((111, 63), PRESET_KEY, dense=(7, 1)),
    Case((1, 100), PRESET_KEY, gqa=6, head_dim=80, mask=True, tau=(0.0, 3.0), spans=2),
    Case((140, 111), CLASSES_KEY, CLASSES_VALUE, gqa=7, head_dim=128, tau=(0.0, 3.0)),
    Case((100, 63), TensorSpec(2, "channels", 32), CLASSES_VALUE, spans=2, kv_heads=2, mask=True),
    Case((111, 1), CLASSES_KEY.replace(group=None), TensorSpec(4), gqa=1, dtype=torch.float32),
    Case((100, 63), PRESET_KEY.replace(group=100),
         CLASSES_VALUE.replace(group=32, classes=((8, 1 / 96), (4, 1 / 6), (1, 1 / 3))),
         head_dim=96, spans=2, dtype=torch.float32),
    Case((80, 33), CLASSES_KEY.replace(group=32, classes=((2, 1.0),)), CLASSES_VALUE, gqa=1),
    # Parameters in 8 bits: of equal and of unequal channels, groups and spans.
    Case((101, 63), SMALL_2.replace(group=32), SMALL_2, gqa=6, tau=(0.0, 3.0), spans=2),
    Case((90, 1), SMALL_TILES[0], SMALL_TILES[1], head_dim=80, spans=2, dtype=torch.float32),
    Case((111, 63), *SMALL, gqa=4, kv_heads=2, tau=(0.0, 3.0), dense=(7, 1)),
    Case((64, 31), TensorSpec(2, "channels", 32), SMALL[1], gqa=1, mask=True),
    # Sign and magnitude: slots and planes, along tokens and channels, words and odd bytes.
    Case((101, 63), INNERQ_KEY, INNERQ_VALUE, gqa=4, kv_heads=2, dense=(5, 40)),
    Case((101, 63), INNERQ_VALUE, INNERQ_KEY, gqa=7, tau=(0.0, 3.0), spans=2),
    Case((77, 130), HYBRID_64, HYBRID_64.replace(bits=1), gqa=6, tau=(0.0, 3.0), head_dim=80),
    Case((77, 9), HYBRID, HYBRID.replace(along="channels"), gqa=1, head_dim=128, mask=True),
    Case((40, 63), HYBRID.replace(along="channels", group=64, param_dtype="bfloat16"),
         HYBRID_64.replace(group=24, param_dtype="float32"),
         head_dim=96, tau=(1.0, 2.0), dtype=torch.float32),
    Case((50, 33), HYBRID.replace(along="channels", group=6), HYBRID.replace(along="span")),
    Case((101, 63), SYMMETRIC_32, SYMMETRIC.replace(along="channels"), gqa=6, dense=(1, 9)),
    Case((101, 63), SYMMETRIC.replace(along="channels", group=12), SYMMETRIC, tau=(0.0, 3.0)),
    Case((51, 1), SYMMETRIC, SYMMETRIC_32.replace(bits=8), head_dim=80, dtype=torch.float32),
    Case((90, 40), SYMMETRIC.replace(along="span", group=40), INNERQ_KEY, spans=3, mask=True),
    # Turned channels and normalised keys: the query of a segment is its own.
    Case((101, 63), ROTATED_KEY, ROTATED_VALUE, gqa=4, kv_heads=2, dense=(5, 40), key_norm=True),
    Case((64, 31), INNERQ_KEY, TensorSpec(1), gqa=6, tau=(0.0, 3.0), key_norm=True, mask=True),
    Case((111, 63), PRESET_KEY.replace(transform="hadamard"),
         TensorSpec(4, "channels", 16, transform="hadamard"),
         head_dim=80, dtype=torch.float32, key_norm=True),
]  # fmt: skip


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Case) -> None:
    query, kv = build(case)
    out = decode_attention_triton(query, poisoned(kv), sm_scale=case.sm_scale, tau=case.tau)
    assert out.dtype == query.dtype
    assert_near(out, reference(case, query, kv))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "spec",
    [
        scheme("duotone-whole"),
        scheme("calibquant", bits=1),
        scheme("kivi", bits=2).replace(recent=32),
        scheme("minmax", bits=2).replace(
            text=KVSpec(TensorSpec(2, group=32), TensorSpec(2, "channels", 32)), recent=8, sink=2
        ),
        scheme("minmax", bits=2).replace(
            visual="text", text=KVSpec(INNERQ_KEY, INNERQ_VALUE), recent=16, sink=4
        ),
    ],
    ids=["duotone", "calibquant", "kivi", "visual and text", "innerq"],
)
def test_matches_the_reference_on_a_cache(spec) -> None:
    visual = torch.zeros(2, 120, dtype=torch.bool, device=device())
    visual[0, 10:70], visual[1, 20:30], visual[1, 40:60] = True, True, True
    real = torch.ones_like(visual)
    real[1, :15] = False
    kv = build_from_store(spec, visual, real, steps=2)
    query = torch.randn(2, 3, 1, 64, device=device())
    calibrated = spec.tau and (float(spec.tau[0]), float(spec.tau[1]))
    for tau in {None, calibrated}:
        out = decode_attention_triton(query, poisoned(kv), sm_scale=0.125, tau=tau)
        expected = attend(query.double(), kv, sm_scale=0.125, tau=tau).float()
        assert_near(out, expected)


def test_a_hybrid_of_the_prompt_alone_matches_the_reference() -> None:
    """Groups of a decode step are symmetric, in the layout that the kernels know."""
    text = KVSpec(*(t.replace(hybrid_at="prefill") for t in (INNERQ_KEY, INNERQ_VALUE)))
    spec = scheme("innerq").replace(text=text, recent=21, sink=4, key_norm=False)
    real = torch.ones(2, 120, dtype=torch.bool, device=device())
    kv = build_from_store(spec, ~real, real, steps=2)
    value = kv[0].value
    modes = unpack(value.symmetric, 1, value.scale.shape[-1]).bool()
    assert modes[:, :, 2:].all()
    assert not modes[:, :, :2].all()
    query = torch.randn(2, 3, 1, 64, device=device())
    out = decode_attention_triton(query, poisoned(kv), sm_scale=0.125)
    assert_near(out, attend(query.double(), kv, sm_scale=0.125).float())


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    case = Case((40, 20), tau=(0.0, 3.0), dtype=torch.float32)
    query, (segment,) = build(case)
    segment = DenseSegment(torch.randn(2, 1, 5, 64), torch.randn(2, 1, 5, 64), torch.tensor([0, 3]))
    segment = DenseSegment(*(t.to(device()) for t in (segment.key, segment.value, segment.lengths)))
    out = decode_attention_triton(query, poisoned([segment]), sm_scale=0.125, tau=(0.0, 3.0))
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert out[1].isfinite().all()


@pytest.mark.parametrize("group", ["tokens", "channels", 32])
def test_scales_beyond_fp16_do_not_overflow(group: str | int) -> None:
    along, size = ("channels", 32) if group == 32 else (group, None)
    spec = TensorSpec(2, along, size, param_dtype="float32")
    case = Case((50, 20), spec, spec, spread=1e6, dtype=torch.bfloat16)
    query, kv = build(case)
    out = decode_attention_triton(query, poisoned(kv), sm_scale=case.sm_scale).double()
    expected = reference(case, query, kv).double()
    # The interpreter truncates to bf16, hence a tolerance of its own.
    assert (out - expected).norm() < 1e-2 * expected.norm()


def test_split_tokens_join_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        (260, 5), TensorSpec(2, group=32), TensorSpec(1), dtype=torch.float32, tau=(0.0, 3.0)
    )
    query, kv = build(case)
    results = []
    for shortest in (24, 1024):
        monkeypatch.setattr("duotone.attention.triton.decode.MIN_SPLIT_TOKENS", shortest)
        results.append(decode_attention_triton(query, kv, sm_scale=case.sm_scale, tau=case.tau))
    assert_near(results[0], results[1])
    assert_near(results[0], reference(case, query, kv))


@pytest.mark.parametrize("channels", [80, 96, 256])
def test_channel_order_is_the_cache_s(channels: int) -> None:
    spec = TensorSpec(1, group=20, classes=((4, 1 / 16), (2, 1 / 4), (1, 1 / 4)))
    packed = pack_tensor(states(2, 2, 60, channels), spec, cut((60, 31), 2))
    order = channel_order(packed)
    assert torch.equal(order.long(), packed.channel_order)


def test_reasons_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((40,), dense=(9,))
    query, kv = build(case)
    assert first_refusal(query, kv) is None
    codes = kv[0].key.codes
    apart = replace(kv[0].key, codes=torch.stack([codes, codes], -1)[..., 0])
    strided = [replace(kv[0], key=apart)]
    assert "['codes'] are not" in first_refusal(query, strided)
    assert "float64" in first_refusal(query.double(), kv)
    assert "at most 512" in first_refusal(query, build(Case((9,), head_dim=520))[1])
    unequal = build(Case((9,), PRESET_KEY, head_dim=272))[1]
    assert "unequal channels must be at most 256" in first_refusal(query, unequal)
    with pytest.raises(ValueError, match="value_dim"):
        decode_attention(query, [*kv, *build(Case((9,), value_dim=80))[1]], sm_scale=0.125)
    wide = kv[1].key.repeat(1, 1, 1, 2)[..., :64]
    refused = DenseSegment(wide, kv[1].value, kv[1].lengths)
    assert "adjacent" in first_refusal(query, [refused])
    with pytest.raises(ValueError, match="contiguous"):
        decode_attention_triton(query, strided, sm_scale=0.125)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "CUDA" in first_refusal(query.cpu(), kv)


@pytest.mark.parametrize(
    "tensor", [TensorSpec(3), TensorSpec(1, classes=((3, 1 / 4),))], ids=["plain", "classes"]
)
def test_three_bits_are_left_to_the_reference(tensor: TensorSpec) -> None:
    for case in (Case((40, 9), tensor), Case((40, 9), value=tensor)):
        query, kv = build(case)
        with pytest.raises(ValueError, match=r"\[1, 2, 4, 8\] bits; got 3.*impl='reference'"):
            decode_attention(query, kv, sm_scale=0.125, impl="triton")
        out = decode_attention(query, kv, sm_scale=0.125)
        assert_near(out, reference(case, query, kv))


def test_splits_and_tiles_stay_in_range() -> None:
    here = torch.device("cpu")
    assert split_count(rows=1, tokens=1, device=here) == 1
    assert split_count(rows=1000, tokens=10**6, device=here) == 1
    assert split_count(rows=2, tokens=10**6, device=here) > 1
    assert split_count(rows=2, tokens=200, device=here) == 2
    for block in (None, 1, 32, 33, 5000):
        assert tile_config(2, 128, block=block)["BN"] >= 16
    # Signs take registers: no tile is longer, or has fewer warps, for having them.
    for groups, bits, d in product((False, True), (1, 2, 4, 8), (64, 128, 256, 512)):
        plain, signed = (tile_config(bits, d, groups=groups, signs=s) for s in (False, True))
        assert signed["BN"] <= plain["BN"]
        assert signed["num_warps"] >= plain["num_warps"]
    assert [tile_config(1, d)["num_warps"] for d in (64, 128, 160, 256, 512)] == [1, 1, 2, 2, 4]


@triton.jit
def block_of_token_kernel(p_offsets, p_block, blocks, LONGEST: tl.constexpr):
    i_t = tl.program_id(0)
    tl.store(p_block + i_t, find_block(p_offsets, blocks, i_t, LONGEST))


@pytest.mark.parametrize("longest", [3, 1 << 30])
def test_the_block_of_a_token_is_found_among_many(longest: int) -> None:
    sizes = torch.tensor([1, 3, 2] * 60, device=device())
    table = BlockTable(torch.nn.functional.pad(sizes.cumsum(0), (1, 0))[None])
    found = torch.full((360,), -1, device=device())
    block_of_token_kernel[(360,)](table.offsets, found, table.blocks, LONGEST=longest)
    assert torch.equal(found[None], table.block_of_token(360))


def test_short_blocks_of_keys_share_one_loop() -> None:
    groups = {64: 1, 100: 2, 256: 4, 257: 0, None: 0}
    for group, tiles in groups.items():
        key = pack_tensor(states(1, 1, 8, 64), TensorSpec(1, group=group), cut((8,), 1))
        assert loop_tiles(key, 64) == tiles
    assert loop_tiles(states(1, 1, 8, 64), 64) == 0
