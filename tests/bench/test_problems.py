"""Random operands and the bytes they are said to take."""

from dataclasses import replace

import pytest
import torch

from duotone.attention import attend
from duotone.attention.cuda.spans.layout import WIDTHS
from duotone.bench.problems import bytes_of, copy_of
from duotone.bench.rows import PackedRow, laid_out
from duotone.bench.schemes import BenchScheme, bench_schemes
from duotone.bench.shapes import SHAPES, Shape
from duotone.quant.accounting import tensor_bytes

CPU = torch.device("cpu")
SHAPE = Shape(2, 8, 2, 300)
SCHEMES = {scheme.name: scheme for scheme in bench_schemes()}


def formula(scheme: BenchScheme) -> tuple[int, int, int]:
    """(codes, params, dense) by `quant.accounting`."""
    heads, tokens = SHAPE.batch * SHAPE.kv_heads, SHAPE.tokens - scheme.window
    channels = scheme.channels or SHAPE.head_dim
    sizes = [tensor_bytes(spec, tokens, channels) for spec in (scheme.key, scheme.value)]
    norms = 4 * channels if scheme.key_norm else 0
    codes, params = (heads * sum(parts) for parts in zip(*sizes, strict=True))
    return codes, params + heads * norms, heads * scheme.window * SHAPE.head_dim * 4


@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_are_the_accountings(name):
    used = bytes_of(SCHEMES[name].problem(SHAPE, CPU))
    assert (used.codes, used.params, used.dense) == formula(SCHEMES[name])
    assert used.total == sum(formula(SCHEMES[name]))


@pytest.mark.parametrize("name", SCHEMES)
def test_outputs_are_finite_and_depend_on_the_codes(name):
    torch.manual_seed(0)
    problem = SCHEMES[name].problem(SHAPE, CPU)
    out = attend(problem.query, problem.segments, sm_scale=problem.sm_scale, tau=problem.tau)
    assert out.isfinite().all()
    first, *rest = problem.segments
    other = replace(first, value=replace(first.value, codes=first.value.codes ^ 0x55))
    changed = attend(problem.query, [other, *rest], sm_scale=problem.sm_scale, tau=problem.tau)
    assert (changed - out).abs().max() > 1e-2


@pytest.mark.parametrize("name", SCHEMES)
def test_copies_are_equal_and_share_no_memory(name):
    problem = SCHEMES[name].problem(SHAPE, CPU)
    copy = copy_of(problem)
    mine, theirs = problem.segments[0], copy.segments[0]
    for part in mine.key.tensor_names():
        before, after = getattr(mine.key, part), getattr(theirs.key, part)
        assert torch.equal(before, after)
        assert before.data_ptr() != after.data_ptr()
    assert copy.query.data_ptr() != problem.query.data_ptr()
    assert bytes_of(copy) == bytes_of(problem)


@pytest.mark.parametrize("bits", WIDTHS)
def test_records_count_their_filling(bits):
    problem = laid_out(SCHEMES[f"{bits} bit"].problem(SHAPE, CPU))
    form = problem.segments[0].records.format
    records = -(-SHAPE.tokens // form.tokens)
    assert bytes_of(problem).codes == 2 * 2 * records * form.nbytes + 2 * 4
    assert bytes_of(copy_of(problem)) == bytes_of(problem)


def test_a_quarter_of_the_channels_at_4_bits_has_the_bytes_of_one_bit():
    problem = laid_out(SCHEMES["32 of 128 channels at 4 bit"].problem(Shape(2, 8, 2, 512), CPU))
    assert problem.query.shape == (2, 8, 1, 32)
    assert problem.sm_scale == 128**-0.5
    assert bytes_of(problem).codes == 2 * 2 * 512 * 2 * 16 + 8
    assert SCHEMES["32 of 128 channels at 4 bit"].bits == 1


@pytest.mark.parametrize(
    "name", ["kivi-2", "innerq-2 hybrid", "innerq-2 symmetric", "xquant shared 2/1"]
)
def test_groups_of_32_are_a_stream_of_records(name):
    problem = laid_out(SCHEMES[name].problem(Shape(2, 8, 2, 320), CPU))
    (records,) = (segment.records for segment in problem.segments)
    used = bytes_of(problem)
    assert used.total == records.data.nbytes
    plain = bytes_of(SCHEMES[name].problem(Shape(2, 8, 2, 320), CPU))
    # A hybrid's modes (a bit per group) are the scales' sign bits here; records may be filled up.
    modes = 2 * 2 * (320 + 320 // 32 * 16)
    assert plain.total - modes <= used.total <= plain.total * 1.25
    # Signs are no codes here.
    assert used.codes < used.total
    (copy,) = (segment.records for segment in copy_of(problem).segments)
    assert torch.equal(copy.data, records.data)
    assert copy.data.data_ptr() != records.data.data_ptr()


def test_a_layer_that_shares_codes_has_them_apart_and_reads_as_many_bytes():
    problem = SCHEMES["xquant shared 2/1"].problem(Shape(2, 8, 2, 320), CPU)
    shared, whole = laid_out(problem, shared=True), laid_out(problem)
    # Codes are filled up to four tiles: 320 tokens are ten.
    filled = 2 * 2 * 2 * (32 * 128 * 3 // 8)
    assert bytes_of(shared).params == bytes_of(whole).params
    assert bytes_of(shared).codes == bytes_of(whole).codes + filled
    row = PackedRow(SCHEMES["xquant shared 2/1"], "cuda")
    for found in (shared, row.lay_out(problem)):
        records = found.segments[0].records
        assert all(codes is not None for codes in records.codes)
        assert bytes_of(found).total == sum(x.nbytes for x in records.buffers)
    (copy,) = (segment.records for segment in copy_of(shared).segments)
    assert copy.key_codes.data_ptr() != shared.segments[0].records.key_codes.data_ptr()


@pytest.mark.parametrize(
    ("name", "per_token"), [("duotone-whole", 38.25), ("duotone-whole, 2 bit", 71.75)]
)
def test_channels_of_unequal_bits_are_in_records_with_their_parameters(name, per_token):
    problem = laid_out(SCHEMES[name].problem(Shape(2, 8, 2, 320), CPU))
    used = bytes_of(problem)
    # Of a span and kv head: largest scales of K; scales, zero-points and channels of V.
    span = 2 * 128 + 2 * 112 + 2 * 128 + 128
    assert used.total == 2 * 2 * (320 * per_token + span) + 2 * 4
    assert used.codes == 2 * 2 * 320 * (32 if name == "duotone-whole" else 64) + 2 * 4
    assert bytes_of(copy_of(problem)) == used


def test_classes_by_span_keep_parameters_outside_of_records():
    used = bytes_of(laid_out(SCHEMES["transform coded, 1 bit"].problem(Shape(2, 8, 2, 320), CPU)))
    # Five records of 64 tokens; of a span and kv head scales, zero-points and channels.
    assert used.codes == 2 * 2 * 320 * 32 + 2 * 4
    assert used.total - used.codes == 2 * 2 * 2 * (2 * 64 + 2 * 128 + 128)


def test_schemes_say_what_shapes_they_lack():
    assert "head_dim 128" in SCHEMES["32 of 128 channels at 4 bit"].reason(Shape(1, 8, 2, 99, 64))
    assert "window" in SCHEMES["kivi-2, window 128"].reason(Shape(1, 8, 2, 128))
    assert all(scheme.reason(SHAPES[0]) is None for scheme in SCHEMES.values())


@pytest.mark.parametrize("text", ["1,2", "a,b,c,d", "8,7,2,10", "0,8,8,10"])
def test_bad_shapes_are_refused(text):
    with pytest.raises(ValueError, match="a shape is batch,q_heads,kv_heads,tokens"):
        Shape.parse(text)


def test_shapes_round_trip():
    assert all(Shape.parse(str(shape)) == shape for shape in SHAPES)
    assert Shape.parse("64,32,8,3328").group == 4
