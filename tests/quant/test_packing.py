import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duotone.quant import pack, packed_bytes, unpack

BITS = st.sampled_from([1, 2, 3, 4, 8])


def random_codes(bits: int, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8)


@given(BITS, st.integers(0, 70), st.integers(1, 3), st.integers(0, 99))
def test_unpack_inverts_pack(bits: int, n: int, rows: int, seed: int) -> None:
    codes = random_codes(bits, (rows, 2, n), seed)
    words = pack(codes, bits)
    assert words.shape == (rows, 2, packed_bytes(n, bits))
    assert torch.equal(unpack(words, bits, n), codes)


@pytest.mark.parametrize(
    ("bits", "codes", "byte"),
    [
        (1, [1, 0, 0, 0, 0, 0, 0, 0], 0b10000000),
        (1, [0, 1, 1, 0, 0, 0, 0, 1], 0b01100001),
        (2, [3, 0, 2, 1], 0b11001001),
        (4, [0xA, 0x5], 0xA5),
        (8, [0x3C], 0x3C),
    ],
)
def test_bytes_are_big_endian_as_in_the_paper(bits: int, codes: list[int], byte: int) -> None:
    """CalibQuant A.1: element i is shifted left by M - N * (1 + i)."""
    assert pack(torch.tensor(codes, dtype=torch.uint8), bits).tolist() == [byte]


def test_eight_codes_of_three_bits_take_three_bytes() -> None:
    codes = torch.tensor([0b101, 0b010, 0b111, 0b000, 0b110, 0b001, 0b011, 0b100])
    words = pack(codes.to(torch.uint8), 3)
    assert words.tolist() == [0b10101011, 0b10001100, 0b01011100]
    assert packed_bytes(9, 3) == 4
    assert pack(codes[:3].to(torch.uint8), 3).tolist() == [0b10101011, 0b10000000]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_row_is_filled_up_with_zeros(bits: int) -> None:
    words = pack(torch.full((1,), (1 << bits) - 1, dtype=torch.uint8), bits)
    assert words.tolist() == [((1 << bits) - 1) << (8 - bits)]


def test_codes_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match=r"0\.\.3; got 4"):
        pack(torch.tensor([4], dtype=torch.uint8), 2)


def test_rows_of_another_length_raise() -> None:
    with pytest.raises(ValueError, match="take 2 bytes"):
        unpack(torch.zeros(3, dtype=torch.uint8), 1, 9)


@pytest.mark.parametrize("bits", [0, 5, 16])
def test_unknown_widths_raise(bits: int) -> None:
    with pytest.raises(ValueError, match="bits must be one of"):
        pack(torch.zeros(8, dtype=torch.uint8), bits)
