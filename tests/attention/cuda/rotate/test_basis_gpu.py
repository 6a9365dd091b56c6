"""Segments in calibrated bases on a real GPU: the turn, the merge behind it, whole calls."""

from dataclasses import replace

import pytest
import torch
from cuda_calls import assert_replays_take_new_queries
from cuda_device import NEEDS_KERNELS
from launch_cases import read_by

from duotone.attention import decode_attention
from duotone.attention.cuda import decode
from duotone.attention.cuda.rotate import queries as rotate_queries
from duotone.attention.cuda.shared import launch
from duotone.quant import TensorSpec
from duotone.quant.rotation import turn_heads

from basis_cases import build_spans, in_bases, laid_out, some_bases
from cases import CALIBRATED, UNITS, Case, assert_near, assert_near_half, build, poisoned, reference

pytestmark = NEEDS_KERNELS
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ODD, WINDOWS = (3329, 100, 63, 1), (1, 160, 0, 700)
SHAPE = {"kv_heads": 2, "head_dim": 128, "dtype": BF16}
THREE = ((900, 0, 300), (40, 0, 7))
CASES = [
    *(Case(ODD, *CALIBRATED, dense=WINDOWS, gqa=gqa, **SHAPE) for gqa in (1, 4, 6, 7, 16)),
    *(Case(ODD, *UNITS, dense=WINDOWS, kv_heads=2, head_dim=d, dtype=dtype)
      for d, dtype in ((64, FP16), (80, BF16), (96, FP16), (128, FP32), (256, BF16))),
    # Without 16-bit tokens, of one sequence, of one without any key, of many.
    Case(ODD, *CALIBRATED, **SHAPE),
    Case((5000,), *CALIBRATED, dense=(300,), **SHAPE),
    Case((70_000,), *CALIBRATED, dense=(300,), **SHAPE),
    Case(THREE[0], *CALIBRATED, dense=THREE[1], **SHAPE),
    Case((300,) * 32, *CALIBRATED, dense=(128,) * 32, **(SHAPE | {"kv_heads": 8})),
    Case((300, 0, 128, 64) * 30, *CALIBRATED, dense=(9, 0, 33, 1) * 30, **SHAPE),
    Case((900, 300), *CALIBRATED, spans=3, dense=(40, 0), **SHAPE),
    Case(ODD, *CALIBRATED, dense=WINDOWS, key_norm=True, **SHAPE),
    # fp32 windows are Triton's.
    Case(ODD, *CALIBRATED, dense=WINDOWS, dense_dtype=FP32, **SHAPE),
]  # fmt: skip

GROUPS, BATCHES = (1, 4, 6, 7, 16), ((1, FP16), (3, FP32), (32, BF16))
# Every group and head_dim, with each batch in turn; the commonest with all.
TURNS = [
    (*BATCHES[(i + j) % 3], group, channels)
    for i, group in enumerate(GROUPS)
    for j, channels in enumerate(rotate_queries.DEPTHS)
] + [(*batch, 4, 128) for batch in BATCHES]


@pytest.fixture
def in_file(tmp_path):
    """Puts a case into the bases of a layer of a new file."""

    def put(case: Case, layer: int = 0) -> Case:
        return in_bases(case, some_bases(tmp_path, case.kv_heads, case.head_dim), layer)

    return put


@pytest.fixture
def sources(monkeypatch) -> list[str]:
    """The files of a test's launches."""
    seen = []

    def kernel(source, name, macros, device, make=launch.kernel):
        seen.append(source)
        return make(source, name, macros, device)

    for module in (launch, rotate_queries):
        monkeypatch.setattr(module, "kernel", kernel)
    return seen


def attend(case: Case, query, kv):
    return decode_attention(query, laid_out(poisoned(kv)), sm_scale=case.sm_scale, impl="cuda")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("batch", "dtype", "group", "channels"), TURNS)
def test_rows_meet_the_matrix_of_their_head(batch, dtype, group, channels) -> None:
    torch.manual_seed(0)
    query = torch.randn(batch, 8 * group, 1, channels, device="cuda").to(dtype)
    matrices = torch.randn(8, channels, channels, device="cuda")
    out = rotate_queries.rotate_queries(query, matrices)
    assert_near(out, turn_heads(query.double(), matrices.double()).float())
    with pytest.raises(AssertionError, match="rms"):
        assert_near(out, turn_heads(query.double(), matrices.roll(1, 0).double()).float())


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Case, in_file) -> None:
    case = in_file(case)
    query, kv = build(case)
    assert_near_half(attend(case, query, kv), reference(case, query, kv))


@pytest.mark.usefixtures("poison")
def test_spans_in_one_basis_take_two_launches_more(in_file, sources) -> None:
    case = in_file(Case(ODD, *CALIBRATED, dense=WINDOWS, **SHAPE))
    other = replace(case, lengths=(1, 500, 64, 0))
    query, kv = build_spans([case, other])
    decodes = ["classes/decode.cu"] * 2
    for dense in (kv[2:], []):
        sources.clear()
        segments = [*kv[:2], *dense]
        out = attend(case, query, segments)
        assert sources == [
            "rotate/queries.cu", *decodes, *["dense/decode.cu"] * len(dense), "rotate/merge.cu",
        ]  # fmt: skip
        assert_near(out, reference(case, query, segments))


@pytest.mark.usefixtures("poison")
def test_two_bases_are_merged_at_once(in_file, sources) -> None:
    cases = [in_file(Case(ODD, *CALIBRATED, dense=WINDOWS, **SHAPE), i) for i in range(2)]
    query, kv = build_spans(cases)
    assert_near(attend(cases[0], query, kv), reference(cases[0], query, kv))
    assert sources[-1] == "rotate/merge.cu"


@pytest.mark.usefixtures("poison")
def test_more_bases_are_merged_by_torch(in_file, sources) -> None:
    cases = [in_file(Case(ODD, *CALIBRATED, dense=WINDOWS, **SHAPE), i) for i in range(2)]
    specs = [spec.replace(transform="hadamard") for spec in CALIBRATED]
    cases.append(Case(ODD, *specs, dense=WINDOWS, **SHAPE))
    query, kv = build_spans(cases)
    assert_near(attend(cases[0], query, kv), reference(cases[0], query, kv))
    assert "rotate/merge.cu" not in sources


@pytest.mark.usefixtures("poison")
def test_rotated_spans_are_merged_by_the_launch(sources) -> None:
    specs = [spec.replace(transform="hadamard") for spec in CALIBRATED]
    case = Case(ODD, *specs, dense=WINDOWS, gqa=7, **SHAPE)
    query, kv = build(case)
    assert_near(attend(case, query, kv), reference(case, query, kv))
    assert (sources[0], sources[-1]) == ("rotate/queries.cu", "rotate/merge.cu")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("out_dtype", [FP16, BF16, FP32], ids=str)
def test_the_launch_does_what_torch_does(out_dtype, in_file) -> None:
    """Into strided rows, log-sum-exps too."""
    case = in_file(Case(THREE[0], *CALIBRATED, dense=THREE[1], **SHAPE))
    query, kv = build(case)
    kv, rows = laid_out(poisoned(kv)), query.shape[:2]
    found = []
    for attend_kv in (decode._attend, decode.attend_by_basis):
        out = torch.full((*rows, 3, 128), torch.nan, dtype=out_dtype, device="cuda")
        lse = torch.full((*rows, 3), torch.nan, device="cuda")
        attend_kv(query, read_by(kv), case.sm_scale, None, out[:, :, 1:2], lse[:, :, 1])
        assert out[:, :, ::2].isnan().all()
        assert lse[:, :, ::2].isnan().all()
        found.append((out[:, :, 1], lse[:, :, 1]))
    (out, lse), (expected, sums) = found
    assert (lse[1] == -torch.inf).all()
    torch.testing.assert_close(lse, sums, rtol=1e-3, atol=2e-3)
    assert_near_half(out, expected)


def test_wrong_bases_are_noticed(in_file) -> None:
    case, other = (
        in_file(Case((300, 900), *CALIBRATED, dense=(9, 40), **SHAPE), i) for i in (0, 1)
    )
    query, kv = build(case)
    expected = reference(case, query, kv)
    for name in ("key", "value"):
        (segment, dense), spec = laid_out(kv), getattr(other, name)
        wrong = replace(segment, **{name: replace(getattr(segment, name), spec=spec)})
        out = decode_attention(query, [wrong, dense], sm_scale=case.sm_scale, impl="cuda")
        with pytest.raises(AssertionError, match="rms"):
            assert_near(out, expected)


@pytest.mark.parametrize("dense", [None, (40, 128, 7)], ids=["packed", "window"])
def test_runs_in_a_graph(dense, in_file) -> None:
    case = in_file(Case((3000, 900, 1), *CALIBRATED, dense=dense, **SHAPE))
    assert_replays_take_new_queries(case, laid_out, assert_near, calls=3)


@pytest.mark.usefixtures("poison")
def test_calibrated_scores_of_turned_values_are_merged_by_torch(in_file, sources) -> None:
    case = in_file(Case(ODD, TensorSpec(1), TensorSpec(1), dense=WINDOWS, tau=(0.0, 3.0), **SHAPE))
    query, kv = build(case)
    segments, call = laid_out(poisoned(kv)), {"sm_scale": case.sm_scale, "tau": case.tau}
    out = decode_attention(query, segments, **call, impl="cuda")
    assert_near(out, reference(case, query, kv))
    assert "rotate/merge.cu" not in sources
