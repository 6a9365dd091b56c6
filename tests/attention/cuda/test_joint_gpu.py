"""Several segments by CUDA kernels on a real GPU: spans, streams and 16-bit windows in one call."""

from dataclasses import make_dataclass, replace

import pytest
import torch
from cuda_calls import assert_near_the_reference
from cuda_device import NEEDS_KERNELS
from held_still import decode
from transformers import LlamaConfig, LlamaForCausalLM

import duotone
from duotone.attention import decode_attention
from duotone.attention.cuda.classes.layout import class_layout
from duotone.attention.cuda.dense import decode as dense_decode
from duotone.attention.cuda.groups.records import GroupLayout, GroupRecords
from duotone.attention.cuda.shared import launch
from duotone.attention.cuda.shared.geometry import Geometry
from duotone.attention.cuda.spans.layout import span_layout
from duotone.cache.pair import PackedPair
from duotone.cache.segments import PackedSegment
from duotone.quant import TensorSpec

from cases import CALIBRATED, Case, assert_near, assert_near_half, build, poisoned, reference

pytestmark = NEEDS_KERNELS
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ODD, WINDOWS = (3329, 100, 63, 1), (1, 160, 33, 700)
FIVE, SHORT = (300, 1, 100, 64, 129), (1, 63, 100, 111, 144)
KIVI = {"key": TensorSpec(2, "tokens", 32), "value": TensorSpec(2, "channels", 32)}
INNER = {
    "key": TensorSpec(2, "channels", 32, "hybrid"),
    "value": TensorSpec(2, "tokens", 32, "hybrid"),
}
TAU = (0.0, 3.0)
CASES = [
    *(Case(ODD, dense=WINDOWS, kv_heads=2, head_dim=128, gqa=gqa, dtype=BF16)
      for gqa in (1, 4, 6, 7, 16)),
    *(Case(ODD, dense=WINDOWS, head_dim=d, dtype=dtype, dense_dtype=kind)
      for d, dtype, kind in (
          (64, FP16, FP16), (80, BF16, BF16), (96, FP32, BF16), (128, FP32, FP16),
          (256, BF16, FP16))),
    Case(ODD, dense=WINDOWS, head_dim=128, dtype=BF16, tau=TAU),
    Case(ODD, dense=WINDOWS, head_dim=128, dtype=BF16, spans=3),
    Case((100,), dense=(20_000,), head_dim=128, dtype=BF16),
    Case((20_000,), dense=(20_000,), head_dim=128, dtype=BF16, tau=TAU),
    Case((300,) * 40, dense=(160,) * 40, kv_heads=8, head_dim=128, dtype=BF16),
    *(Case(ODD, **KIVI, dense=WINDOWS, head_dim=d, kv_heads=2, dtype=BF16) for d in (64, 128)),
    Case(ODD, **KIVI, dense=WINDOWS, head_dim=128, dtype=BF16, key_norm=True),
    Case(ODD, **INNER, dense=WINDOWS, head_dim=128, dtype=FP16, gqa=7),
    # Windows of one token, of few and of many; splits; more units than places.
    *(Case(FIVE, dense=SHORT, kv_heads=2, head_dim=128, gqa=gqa, dtype=BF16)
      for gqa in (1, 4, 6, 7, 16)),
    *(Case(FIVE, dense=SHORT, head_dim=d, gqa=gqa, dtype=dtype)
      for d, gqa, dtype in ((64, 7, FP16), (80, 6, FP32), (96, 1, FP16), (256, 7, FP32))),
    Case((3, 100), dense=(20_000, 77), head_dim=80, dtype=FP16),
    Case((300,) * 60, dense=(129, 160, 144) * 20, kv_heads=8, head_dim=128, gqa=6, dtype=BF16),
    # What the dense kernel lacks is Triton's.
    Case(ODD, dense=WINDOWS, head_dim=128, dtype=BF16, dense_dtype=FP32),
]  # fmt: skip


def laid_out(kv):
    """Segments with their packed tokens in records."""
    return [_laid_out(s) if isinstance(s, PackedSegment) else s for s in kv]


def _laid_out(segment):
    groups = segment.key.spec.group is not None
    pair = PackedPair(segment.key, segment.value)
    pair = pair.laid_out(GroupLayout() if groups else span_layout)
    assert isinstance(pair.records, GroupRecords) == groups
    assert pair.records is not None
    return replace(segment, key=pair.key, value=pair.value, records=pair.records)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Case) -> None:
    assert_near_the_reference(case, laid_out)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("tau", [None, TAU], ids=["plain", "tau"])
def test_spans_streams_and_windows_meet(tau) -> None:
    case = Case(ODD, dense=WINDOWS, kv_heads=2, head_dim=128, dtype=BF16, tau=tau)
    query, kv = build(case)
    _, stream = build(replace(case, lengths=(64, 500, 1, 33), **KIVI, dense=None, tau=None), 1)
    kv = [kv[0], replace(stream[0], visual=False), kv[1]]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        segments = laid_out(poisoned([kv[i] for i in order]))
        out = decode_attention(query, segments, sm_scale=case.sm_scale, tau=tau, impl="cuda")
        assert_near(out, reference(case, query, kv))


# 800 kv heads: more than places for any of the kernels on 132 multiprocessors. Every 7th sequence
# has no packed token, every 7th no dense one.
RAGGED, RAGGED_WINDOWS = (
    tuple(lengths[i % 7] for i in range(100))
    for lengths in ((0, 1, 97, 300, 128, 33, 257), (5, 0, 160, 16, 17, 1, 33))
)
MANY = {"kv_heads": 8, "head_dim": 128, "dtype": BF16}
CLASSES = {
    name: getattr(duotone.scheme("duotone-whole", bits=1).visual, name) for name in ("key", "value")
}


@pytest.fixture
def macros(monkeypatch) -> list[dict]:
    """Macros of the launches of a test, of the merging one {}."""
    seen = []

    def kernel(source, name, given, device, make=launch.kernel):
        seen.append({} if source == launch.MERGE_SOURCE else dict(given))
        return make(source, name, given, device)

    monkeypatch.setattr(launch, "kernel", kernel)
    return seen


def attend_all(case: Case, kv, query):
    return decode_attention(query, laid_out(poisoned(kv)), sm_scale=case.sm_scale, impl="cuda")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "case",
    [
        Case(RAGGED, dense=RAGGED_WINDOWS, **MANY),
        Case(RAGGED, **KIVI, dense=RAGGED_WINDOWS, **MANY),
        Case(RAGGED, **INNER, dense=RAGGED_WINDOWS, **MANY),
        Case(RAGGED, dense=RAGGED_WINDOWS, **(MANY | {"gqa": 7})),
        Case(RAGGED, TensorSpec(2), TensorSpec(2), dense=RAGGED_WINDOWS, **MANY),
    ],
    ids=["1 bit", "kivi", "innerq", "gqa7", "2 bit"],
)
def test_more_units_than_places(case: Case, macros) -> None:
    query, kv = build(case)
    out = attend_all(case, kv, query)
    assert [x.get("MERGE") for x in macros] == [2, 3]
    assert_near(out, reference(case, query, kv))


@pytest.mark.usefixtures("poison")
def test_more_units_than_places_of_three_kinds(macros) -> None:
    case = Case(RAGGED, dense=RAGGED_WINDOWS, **MANY)
    query, kv = build(case)
    _, stream = build(replace(case, lengths=RAGGED[::-1], **KIVI, dense=None), 1)
    kv = [*kv, replace(stream[0], visual=False)]
    expected = reference(case, query, kv)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        out = attend_all(case, [kv[i] for i in order], query)
        assert_near(out, expected)
    assert [x["MERGE"] for x in macros] == [2, 2, 3] * 3
    assert {x["WARPS"] for x in macros if "K_ALONG_K" in x} == {2}


@pytest.mark.parametrize(("heads", "merge"), [(1, 2), (-1, 1)], ids=["launch", "tickets"])
def test_the_rule_for_merging_changes_no_result(heads: int, merge: int, macros) -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    batch = launch.HEADS_PER_SM_TO_MERGE * sms + min(heads, 0)
    shape = {"head_dim": 128, "dtype": BF16, "dense": (40, 7) * (batch // 2) + (9,) * (batch % 2)}
    case = Case((300,) * batch, **shape)
    query, kv = build(case)
    out = attend_all(case, kv, query)
    assert macros[0]["MERGE"] == merge
    assert_near(out, reference(case, query, kv))


@pytest.fixture(params=[launch.MergedBy.LAUNCH, launch.MergedBy.TASK], ids=["behind", "task"])
def merges(request, monkeypatch) -> list:
    """Merges of a call's two tasks and of the launch after them, if there is one."""
    monkeypatch.setattr(launch, "merged_by", lambda tasks: request.param)
    if request.param is launch.MergedBy.LAUNCH:
        return [2, 2, None]
    monkeypatch.setattr(dense_decode, "geometry", lambda *a: Geometry(2, 1, 1))
    return [2, 3]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "case",
    [
        *(replace(c, tau=None) for c in CASES if c.dense_dtype != FP32),
        Case((3329, 0, 700), spans=5, dense=(1, 40, 0), kv_heads=2, head_dim=128, dtype=BF16),
    ],
    ids=str,
)
def test_a_launch_that_merges_matches_the_reference(case: Case, merges, macros) -> None:
    query, kv = build(case)
    assert_near_half(attend_all(case, kv, query), reference(case, query, kv))
    assert [x.get("MERGE") for x in macros] == merges


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("specs", [tuple(CLASSES.values()), CALIBRATED], ids=["groups", "spans"])
@pytest.mark.parametrize("spans", [1, 3])
def test_classes_and_windows_are_merged_by_a_launch(spans: int, specs, merges, macros) -> None:
    case = Case(ODD, *specs, spans=spans, dense=WINDOWS, kv_heads=4, head_dim=128, dtype=BF16)
    query, kv = build(case)
    first, *rest = poisoned(kv)
    pair = PackedPair(first.key, first.value).laid_out(class_layout)
    first = replace(first, key=pair.key, value=pair.value, records=pair.records)
    out = decode_attention(query, [first, *rest], sm_scale=case.sm_scale, impl="cuda")
    assert [x.get("MERGE") for x in macros] == merges
    assert_near(out, reference(case, query, kv))


@pytest.mark.usefixtures("merges")
def test_a_launch_that_merges_follows_lengths_in_a_graph() -> None:
    assert_a_graph_follows_lengths()


def test_peaky_scores_keep_their_low_digits() -> None:
    case = Case((500, 30), dense=(3000, 100), kv_heads=2, head_dim=128, dtype=FP16)
    assert_near_the_reference(case, laid_out, query_scale=6)


def test_a_graph_follows_lengths_on_the_device() -> None:
    assert_a_graph_follows_lengths()


def assert_a_graph_follows_lengths() -> None:
    """A captured call is right for lengths that change on the device."""
    case = Case((200, 90), **KIVI, dense=(40, 7), kv_heads=2, head_dim=128, dtype=BF16)
    query, kv = build(case)
    segments = laid_out(kv)
    call = {"sm_scale": case.sm_scale, "impl": "cuda"}
    decode_attention(query, segments, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(query, segments, **call)
    for lengths in ([200, 90], [32, 64], [1, 5]):
        for segment in kv:
            segment.lengths.copy_(torch.tensor(lengths).clamp_max(segment.tokens))
        graph.replay()
        cut = [replace(s, lengths=s.lengths.clone()) for s in kv]
        assert_near(out, reference(case, query, cut))


@torch.inference_mode()
@pytest.mark.parametrize("frozen", [False, True], ids=["grows", "frozen"])
@pytest.mark.parametrize("name", ["kivi", "innerq"])
def test_a_model_says_what_it_says_by_the_reference(name: str, frozen: bool) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval().to("cuda", BF16)
    tokens = torch.randint(300, (2, 230), device="cuda")
    spec = duotone.scheme(name, bits=4).replace(sink=0, recent=32)
    logits = {}
    for impl in ("reference", "auto"):
        cache, still = duotone.QuantizedCache(model, spec, impl=impl), frozen and impl == "auto"
        first = model(tokens[:, :150], past_key_values=cache).logits[:, -1:]
        later = decode(model, cache, tokens[:, 150:], room=80 if still else 0)
        logits[impl] = torch.cat([first, later], 1).float()
        stores = [layer.store for layer in cache.layers]
        if still:
            stores = cache.timeline.frozen.decoder.stores
        assert all((store.stream.records is not None) == (impl == "auto") for store in stores)
        cache.detach()
    error = (logits["auto"] - logits["reference"]).norm() / logits["reference"].norm()
    assert error < 2e-2


def test_windows_are_read_by_the_kernel(macros) -> None:
    case = Case((300,), dense=(144,), head_dim=128, dtype=BF16)
    query, kv = build(case)
    out = attend_all(case, kv, query)
    assert [x["KV"] for x in macros if "KV" in x] == [1]
    expected = reference(case, query, kv)
    assert_near(out, expected)
    kv[1].value[:, :, 64:96] *= -1
    out = attend_all(case, kv, query)
    with pytest.raises(AssertionError, match="rms"):
        assert_near(out, expected)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("tokens", "stages"), [(16, 2), (16, 3), (32, 2), (32, 3)])
@pytest.mark.parametrize("warps", [1, 2, 4])
def test_geometries_change_no_result(warps, tokens, stages, monkeypatch) -> None:
    fields = [("tokens", int, tokens), ("stages", int, stages)]
    form = make_dataclass("Form", fields, bases=(dense_decode.DenseFormat,), frozen=True)
    monkeypatch.setattr(dense_decode, "DenseFormat", form)
    monkeypatch.setattr(dense_decode, "geometry", lambda *a: Geometry(warps, 1, 2))
    case = Case(FIVE, dense=SHORT, kv_heads=2, head_dim=128, dtype=BF16)
    query, kv = build(case)
    assert_near(attend_all(case, kv, query), reference(case, query, kv))
