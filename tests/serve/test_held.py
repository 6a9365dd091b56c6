"""Requests held next to 16 bit, by hand."""

import pytest

from duotone.serve.held import Layers, Paged, said

TOKEN = 2 * 8 * 128 * 2  # Llama 8B: 8 heads of 128
PAGE = 32 * 8 * 96
# Qwen3.5: 10 layers of 2 heads of 256, 30 states of 2,146,304 bytes.
HYBRID_TOKEN, HYBRID_PAGE = 2 * 2 * 256 * 2, 5600 * 2 * 192
HYBRID = Layers((Paged(10, 5600, 1),), HYBRID_PAGE, HYBRID_TOKEN, states=30, state_bytes=2_146_304)


def test_a_plain_model_gains_what_its_bytes_say() -> None:
    plain = Layers((Paged(32, 32, 6),), PAGE, TOKEN)
    # 256 pages and 6 of rings, against 512 blocks of 16 tokens.
    assert plain.gain(8192) == pytest.approx(512 * 16 * TOKEN / (262 * PAGE))
    text, nothing = said(plain, most=40000)
    assert text.endswith(
        "blocks of 32 tokens; requests held, times 16 bit: 4.5 at 1,024, 5.2 at "
        "8,192, 5.3 at 32,768"
    )
    assert not nothing


def test_a_rank_gains_as_much_as_the_model() -> None:
    """Two of eight heads: pages and tokens are as many times smaller."""
    rank = Layers((Paged(32, 32, 6),), PAGE // 4, TOKEN // 4)
    assert said(rank, 40000) == said(Layers((Paged(32, 32, 6),), PAGE, TOKEN), 40000)


def test_layers_of_several_widths_are_counted_together() -> None:
    # 4 and 2 bits of head_dim 128: blocks of 96 tokens, and of 160 in as many bytes.
    page = 160 * 8 * 96
    mixed = Layers((Paged(2, 96, 2), Paged(30, 160, 2)), page, TOKEN)
    blocks = 2 * (11 + 2) + 30 * (7 + 2)
    assert mixed.gain(1024) == pytest.approx(32 * 64 * 16 * TOKEN / (blocks * page))
    assert "blocks of 96 and 160 tokens" in said(mixed, 1024)[0]


def test_groups_of_layers_that_are_not_full_take_memory() -> None:
    page = 160 * 8 * 96
    even = Layers((Paged(4, 96, 2), Paged(28, 160, 2)), page, TOKEN)
    odd = Layers((Paged(3, 96, 2), Paged(29, 160, 2)), page, TOKEN)
    # 29 layers in groups of 3 are as much as 30; three of one kind and four of another are 4 each.
    assert odd.gain(1024) == pytest.approx(2048 * 16 * TOKEN / ((3 * 13 + 30 * 9) * page))
    assert even.gain(1024) == pytest.approx(2048 * 16 * TOKEN / ((4 * 13 + 28 * 9) * page))
    near = Layers((Paged(3, 96, 2), Paged(4, 160, 2)), page, TOKEN)
    assert near.gain(1024) == pytest.approx(7 * 64 * 16 * TOKEN / (4 * (13 + 9) * page))


def test_a_state_makes_blocks_long_and_short_requests_gain_nothing() -> None:
    gains = [HYBRID.gain(x) for x in (1024, 8192, 32768)]
    assert gains[0] < 1 < gains[1] < gains[2]
    assert gains[2] == pytest.approx(
        (10 * 31 + 30) * 1056 * HYBRID_TOKEN / ((10 * 7 + 30) * HYBRID_PAGE), rel=0.03
    )


def test_where_few_bits_gain_nothing_it_is_said() -> None:
    assert said(HYBRID, most=2048)[1]
    assert not said(HYBRID, most=32768)[1]
    # Windows stay in 16 bit: what they hold is no gain.
    page = 192 * 8 * 96
    text, nothing = said(Layers((Paged(1, 192, 1),), page, TOKEN, windows=(1024,) * 40), most=512)
    assert nothing
    assert "at 512" in text
