import pytest
import torch

from duotone.attention.cuda.spans.layout import (
    WIDTHS,
    RecordFormat,
    from_records,
    key_order,
    to_records,
    value_order,
)
from duotone.cache import BlockTable

FORMATS = [
    RecordFormat(head_dim, key_bits, value_bits)
    for head_dim in (64, 80, 96, 128, 256)
    for key_bits, value_bits in (*zip(WIDTHS, WIDTHS, strict=True), (1, 2), (4, 1), (3, 4), (8, 3))
]


def name(form):
    return f"d{form.head_dim}k{form.key_bits}v{form.value_bits}"


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("order", [key_order, value_order])
@pytest.mark.parametrize("channels", [64, 96, 128, 256])
def test_every_element_of_a_tile_has_one_place(channels, order, bits):
    places, each = order(channels, bits), bits if 8 % bits else 1
    assert places.shape == (8 * channels * bits, 8 * each // bits)
    assert torch.equal(places.flatten().sort().values, torch.arange(64 * channels * each))


def test_a_key_stands_where_the_picture_says():
    places = key_order(128, 1)
    # Lane 7 (g = 1, t = 3): word 1 is half 1 of tokens 0..15; byte 2, bit 5.
    byte = 7 * 16 + 1 * 4 + 2
    assert places[byte, 5] == (8 + 1) * 128 + 16 * 5 + 4 * 3 + 2


@pytest.mark.parametrize("form", FORMATS, ids=name)
@pytest.mark.parametrize(
    "offsets",
    [[[0, 1]], [[0, 63]], [[0, 256, 300]], [[0, 100, 111], [0, 0, 65]], [[0, 0], [0, 130]]],
    ids=str,
)
def test_records_are_an_exact_inverse(form, offsets):
    torch.manual_seed(0)
    blocks = BlockTable(torch.tensor(offsets))
    shape = (len(offsets), 2, blocks.tokens, form.head_dim)
    key = torch.randint(0, 1 << form.key_bits, shape, dtype=torch.uint8)
    value = torch.randint(0, 1 << form.value_bits, shape, dtype=torch.uint8)
    records = to_records(key, value, blocks, form)
    assert records.data.shape[3] == form.nbytes
    back = from_records(records, blocks)
    for b, length in enumerate(blocks.lengths.tolist()):
        assert torch.equal(back[0][b, :, :length], key[b, :, :length])
        assert torch.equal(back[1][b, :, :length], value[b, :, :length])


def test_a_changed_byte_is_noticed():
    form, blocks = RecordFormat(64, 2, 1), BlockTable(torch.tensor([[0, 70]]))
    codes = torch.zeros(1, 1, 70, 64, dtype=torch.uint8)
    records = to_records(codes, codes, blocks, form)
    records.data[0, 0, 0, 0] = 1
    key, value = from_records(records, blocks)
    assert key.sum() == 1
    assert not value.any()


def test_picking_sequences_picks_their_records():
    form, blocks = RecordFormat(64, 1, 1), BlockTable(torch.tensor([[0, 70], [0, 300]]))
    codes = torch.randint(0, 2, (2, 1, 300, 64), dtype=torch.uint8)
    picked = to_records(codes, codes, blocks, form).rows(torch.tensor([1]))
    key, _ = from_records(picked, blocks.rows(torch.tensor([1])))
    assert torch.equal(key[0], codes[1])
