import struct
from collections.abc import Iterable

import pytest
import torch

import duotone
from duotone.attention.cuda.classes.format import COLUMN, Classes, ClassFormat, format_of
from duotone.attention.cuda.classes.layout import class_layout, from_class_records, to_class_records
from duotone.attention.cuda.shared.slots import TILE
from duotone.attention.refused import RefusedError
from duotone.cache import BlockTable, PackedTensor, pack_tensor
from duotone.quant import TensorSpec

from cases import CALIBRATED, CLASSES_KEY, CLASSES_VALUE, PRESET_KEY, SMALL, SMALL_TILES, UNITS

PRESETS = {
    name: (visual.key, visual.value)
    for name, visual in (
        ("one", duotone.scheme("duotone-whole", bits=1).visual),
        ("two", duotone.scheme("duotone-whole", bits=2).visual),
        ("tuned", duotone.scheme("duotone-tuned").visual),
    )
}
IN_TILES = PRESETS | {
    "three": (PRESET_KEY, CLASSES_VALUE),
    "wide": (CLASSES_KEY, CLASSES_VALUE),
    "small": SMALL_TILES,
    "small K, two": (PRESETS["two"][0].replace(param_dtype="float8"), PRESETS["two"][1]),
    "plain K": (TensorSpec(2, group=64), CLASSES_VALUE),
}
BY_SPAN = {
    "calibrated": CALIBRATED,
    "units": UNITS,
    "small by span": SMALL,
    "small V": (UNITS[0], SMALL[1]),
    "plain V": (CALIBRATED[0], TensorSpec(2)),
    "plain K by span": (TensorSpec(1), UNITS[1]),
}
SPECS = IN_TILES | BY_SPAN


def packed(specs, spans, head_dim=64, heads=2):
    """(K, V) of random tokens in these spans."""
    torch.manual_seed(0)
    blocks = BlockTable(torch.tensor(spans))
    x = torch.randn(2, len(spans), heads, blocks.tokens, head_dim)
    x = x * torch.linspace(0.2, 2, head_dim)[torch.randperm(head_dim)] + torch.randn(head_dim)
    return tuple(pack_tensor(t, spec, blocks) for t, spec in zip(x, specs, strict=True))


def real_rows(x: PackedTensor, name: str, b: int) -> torch.Tensor:
    """The rows of a sequence that belong to its tokens, or to blocks with tokens."""
    rows = getattr(x, name)[b]
    if name == "codes":
        return rows[:, : int(x.blocks.lengths[b])]
    return rows[:, x.blocks.sizes[b] > 0]


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    "spans",
    [[[0, 1]], [[0, 63]], [[0, 256, 300]], [[0, 100, 211], [0, 0, 65]], [[0, 0], [0, 130]]],
    ids=str,
)
@pytest.mark.parametrize("name", SPECS)
def test_records_are_an_exact_inverse(name, spans, head_dim):
    key, value = packed(SPECS[name], spans, head_dim)
    records = to_class_records(key, value)
    assert records.data.shape[3] == records.format.nbytes
    assert records.format.nbytes % 16 == 0
    back = from_class_records(records, key.without_parts(), value.without_parts())
    for ours, theirs in zip(back, (key, value), strict=True):
        assert ours.tensor_names() == theirs.tensor_names()
        for part in theirs.tensor_names():
            for b in range(len(spans)):
                assert torch.equal(real_rows(ours, part, b), real_rows(theirs, part, b)), part


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", IN_TILES)
def test_a_tile_decodes_as_the_drawing_says(name, head_dim):
    """Tile 1 of a span of 111 tokens, byte by byte, K's parameters included."""
    key, value = packed(SPECS[name], [[0, 111]], head_dim, heads=1)
    records = to_class_records(key, value)
    form, tiles = records.format, records.data[0, 0].reshape(-1, sum(records.format.parts))
    raw = bytes(tiles[1].tolist())
    k_bytes, v_bytes, zeros, scales, channels, *_ = form.parts
    keys = place_codes(raw[:k_bytes], form.key, value=False)
    values = place_codes(raw[k_bytes : k_bytes + v_bytes], form.value, value=True)
    at = k_bytes + v_bytes
    places = form.key.places
    channel = raw[at + zeros + scales :]
    if form.key_small:
        of_scale, of_zero = channel[channels : channels + 2]
        zero = small_numbers(raw[at : at + head_dim], of_zero, signed=True)
        scale = small_numbers(raw[at + zeros : at + zeros + places], of_scale, signed=False)
        assert not any(channel[channels + 2 :])
    else:
        zero = struct.unpack_from(f"<{head_dim}e", raw, at)
        scale = struct.unpack_from(f"<{places}e", raw, at + zeros)
    sides = zip(form.key.sizes, form.key.columns, strict=True)
    widths = [width for (width, _), columns in sides for _ in range(columns)]
    decoded = torch.tensor(zero).repeat(TILE, 1)
    for place in form.key.place_of_rank.tolist():
        width = widths[place // COLUMN]
        half = (2**width - 1) / 2 if form.key_small else 0  # from the middle to the lowest level
        decoded[:, channel[place]] += (keys[:, place] - half) * scale[place]
    expected = key.dequantize()[0, 0, TILE:]
    torch.testing.assert_close(decoded[: len(expected)], expected, rtol=1e-5, atol=1e-5)
    rank_codes = values[:, form.value.place_of_rank]
    assert torch.equal(
        rank_codes[:47], value.unpacked()[0, 0, TILE:, : form.value.channels].float()
    )
    assert not keys[47:].any()
    assert not values[47:].any()


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", BY_SPAN)
def test_a_tile_without_parameters_decodes_with_those_of_its_span(name, head_dim):
    """Tile 1 of the second span, of 111 tokens."""
    key, value = packed(BY_SPAN[name], [[0, 100, 211]], head_dim, heads=1)
    records = to_class_records(key, value)
    form = records.format
    tile = int(records.first[0, 1]) * form.tiles + 1
    raw = bytes(records.data[0, 0].reshape(-1, sum(form.parts))[tile].tolist())
    split = form.key.codes_bytes
    assert len(raw) == split + form.value.codes_bytes
    for which, x, own, classes in (
        ("key", key, raw[:split], form.key),
        ("value", value, raw[split:], form.value),
    ):
        scale, zero, order = (
            getattr(records, f"{which}_{part}")[0, 0, 1] for part in ("scale", "zero", "order")
        )
        if x.has_bytes:
            scale, zero = (
                torch.tensor(small_numbers(row[1:].tolist(), int(row[0]), signed=signed))
                for row, signed in ((scale, False), (zero, True))
            )
            for i, (width, count) in enumerate(classes.sizes):
                start = sum(n for _, n in classes.sizes[:i])
                ranks = slice(start, start + count)
                zero[ranks] -= scale[ranks] * (2**width - 1) / 2
        codes = place_codes(own, classes, value=which == "value")
        decoded = torch.empty(TILE, head_dim)
        decoded[:, order.long()] = zero.float()
        coded = order[: classes.channels].long()
        decoded[:, coded] += codes[:, classes.place_of_rank] * scale.float()
        expected = x.dequantize()[0, 0, 100 + TILE : 211]
        torch.testing.assert_close(decoded[: len(expected)], expected, rtol=1e-5, atol=1e-5)
        assert not codes[47:].any()


def small_numbers(codes: Iterable[int], exponent: int, signed: bool) -> list[float]:
    """Numbers of a row of 8 bits, from the drawing of `quant.small_floats`."""
    halves = (
        struct.unpack(
            "<e", struct.pack("<H", (c & 128) << 8 | (c & 127) << 6 if signed else c << 6)
        )
        for c in codes
    )
    return [half * 2.0 ** (exponent - 127) for (half,) in halves]


def test_parameters_of_8_bits_halve_what_is_no_code():
    bytes_of = {
        name: to_class_records(*packed(specs, [[0, 128]])).params_bytes
        for name, specs in (("small", SMALL), ("plain", CALIBRATED))
    }
    # Per kv head: 128 zero-points and 72 scales of K and V; the orders of channels stay.
    assert bytes_of == {"plain": 2 * (2 * 200 + 128), "small": 2 * (200 + 4 + 128)}


def test_half_columns_of_4_and_2_bits_take_half_the_words():
    form = ClassFormat.of(*UNITS, 64)
    assert (form.key.sizes, form.key.columns) == (((4, 8), (2, 16), (1, 24)), (1, 1, 2))
    assert form.key.places == 64
    assert form.value.sizes == ((2, 24), (1, 8))
    # 1 bit is filled up to columns of 16 channels.
    assert form.parts == ((2 + 2 + 2) * 128, (2 + 1 + 1) * 128)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["duotone", "duotone-whole"])
def test_codes_of_presets_are_not_filled_up(name, head_dim, bits):
    spec = duotone.scheme(name, bits=bits)
    for kv in (spec.visual, spec.background):
        for tensor in (kv.key, kv.value) if kv else ():
            sizes = Classes.of(tensor, head_dim)
            assert sizes.codes_bytes == TILE * sum(width * n for width, n in sizes.sizes) // 8


def test_half_columns_have_keys_parameters_twice():
    key, value = packed(
        (SMALL_TILES[0].replace(classes=((4, 1 / 8), (2, 3 / 8))), UNITS[1]), [[0, 100]]
    )
    records = to_class_records(key, value)
    assert records.format.key.rank_of_place.tolist() == [
        *range(8), *range(8), *range(8, 24), *range(24, 32), *range(24, 32)
    ]  # fmt: skip
    tile = records.data[0, 0].reshape(-1, sum(records.format.parts))[0]
    *_, scales, channels, _ = tile.split(records.format.parts)
    for part in (scales, channels):
        assert torch.equal(part[:8], part[8:16])
        assert torch.equal(part[32:40], part[40:48])
        assert len(part[:8].unique()) > 1


def test_records_of_few_bits_hold_no_more_tokens_than_a_picture():
    few = TensorSpec(classes=((1, 1 / 8),))
    assert ClassFormat.of(few, few, 64).tokens == 256
    key, value = packed((few, few), [[0, 256, 512]], heads=1)
    records = to_class_records(key, value)
    assert records.data.shape == (1, 1, 2, 4 * 2 * 128)
    assert records.first.tolist() == [[0, 1]]


def place_codes(raw: bytes, classes: Classes, value: bool) -> torch.Tensor:
    """Codes of a tile, tokens by places, from the registers of the kernel's operands."""
    words = struct.unpack(f"<{len(raw) // 4}I", raw)
    total = sum(classes.words)
    unit = 4 if total % 4 == 0 else 1 if total % 2 else 2
    out = torch.zeros(TILE, classes.places)
    first_word = first_column = 0
    for (bits, n), columns in zip(classes.sizes, classes.columns, strict=True):
        per_byte, half = 8 // bits, bits > 1 and 0 < n % 16 <= 8
        whole = columns - half
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for e in range(8 * whole + 4 * half):
                w = first_word + e // per_byte
                word = words[w // unit * 32 * unit + lane * unit + w % unit]
                in_half = e - 8 * whole
                a, column = (
                    (e // whole, first_column + e % whole)
                    if in_half < 0
                    else (2 * in_half if value else in_half, first_column + whole)
                )
                for j in range(4):
                    code = word >> (8 * j + bits * (e % per_byte)) & ((1 << bits) - 1)
                    if value:
                        token = 32 * (a // 4) + 8 * (a // 2 % 2) + 2 * t + 16 * (j % 2) + j // 2
                        out[token, 16 * column + 8 * (a % 2) + g] = code
                    else:
                        token, slot = 8 * a + g, 4 * t + j
                        if in_half >= 0 and slot >= 8:
                            token, slot = token + 32, slot - 8
                        out[token, 16 * column + slot] = code
        first_word += bits * whole + bits // 2 * half
        first_column += columns
    return out


def test_largest_scales_are_those_of_the_span():
    key, value = packed(PRESETS["one"], [[0, 150, 300], [0, 100, 100]])
    records = to_class_records(key, value)
    order, full = key.channel_order, key.full_scale
    by_channel = torch.empty_like(full).scatter_(-1, order, full)
    # Groups of 64: three per span in the first sequence, two in the second.
    assert torch.equal(records.key_top[0, :, 0], by_channel[0, :, :3].amax(1))
    assert torch.equal(records.key_top[0, :, 1], by_channel[0, :, 3:6].amax(1))
    assert torch.equal(records.key_top[1, :, 0], by_channel[1, :, :2].amax(1))
    assert not records.key_top[1, :, 1].any()


def test_a_changed_byte_is_noticed():
    key, value = packed(PRESETS["one"], [[0, 100]])
    records = to_class_records(key, value)
    records.data[0, 0, 0, 0] ^= 1
    back, same = from_class_records(records, key.without_parts(), value.without_parts())
    assert not torch.equal(back.codes, key.codes)
    assert torch.equal(same.codes, value.codes)


def test_a_changed_order_of_a_span_is_noticed():
    key, value = packed(BY_SPAN["units"], [[0, 100]])
    records = to_class_records(key, value)
    records.key_order[:] = records.key_order.flip(-1)
    back, same = from_class_records(records, key.without_parts(), value.without_parts())
    assert not torch.equal(back.classes, key.classes)
    assert torch.equal(same.classes, value.classes)


@pytest.mark.parametrize("name", ["one", "calibrated"])
def test_picking_sequences_picks_their_records(name):
    key, value = packed(SPECS[name], [[0, 100], [0, 300]])
    index = torch.tensor([1])
    picked = to_class_records(key, value).rows(index)
    back, _ = picked.canonical(*(x.without_parts().rows(index) for x in (key, value)))
    assert torch.equal(back.codes[0], key.codes[1])
    assert picked.nbytes * 2 == to_class_records(key, value).nbytes


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (TensorSpec(2, group=64), TensorSpec(2), "hold classes"),
        (PRESET_KEY.replace(group=32), CLASSES_VALUE, "multiple of 64"),
        (PRESET_KEY, CLASSES_VALUE.replace(group=128), "none in V"),
        (PRESET_KEY.replace(group=128), CLASSES_VALUE.replace(group=128), "none in V"),
        (CALIBRATED[0], CLASSES_VALUE.replace(group=64), "none in V"),
        (TensorSpec(1, group=64, classes=((8, 1 / 4),)), CLASSES_VALUE, "have"),
        (CALIBRATED[0], TensorSpec(8), "have"),
        (CALIBRATED[0], TensorSpec(2, "channels"), "choice of along"),
        (CALIBRATED[0].replace(param_dtype="bfloat16"), TensorSpec(2), "param_dtype"),
    ],
    ids=str,
)
def test_what_the_kernel_lacks_has_a_reason(key, value, reason):
    with pytest.raises(RefusedError, match=reason):
        format_of(key, value, (64, 64))
    assert class_layout(*packed((key, value), [[0, 128]])) is None


def test_spans_of_a_few_tokens_and_groups_across_tiles_have_no_records():
    assert class_layout(*packed(PRESETS["one"], [[0, 100, 150]])) is None
    key, value = packed(PRESETS["one"], [[0, 200]])
    assert class_layout(key, value) is not None
    other, _ = packed(PRESETS["one"], [[0, 30, 200]])
    assert class_layout(other, value) is None


def test_spans_of_k_and_v_are_the_same():
    key, value = packed(CALIBRATED, [[0, 100, 200]])
    assert class_layout(key, value) is not None
    other, _ = packed(CALIBRATED, [[0, 64, 200]])
    assert class_layout(other, value) is None
