"""Requests held next to 16 bit, by hand."""

import pytest

from duotone.serve.held import Layers, said

TOKEN = 2 * 8 * 128 * 2  # Llama 8B: 8 heads of 128
PAGE = 32 * 8 * 96


def test_a_plain_model_gains_what_its_bytes_say() -> None:
    plain = Layers(paged=32, kept=0, windows=(), states=0, state_bytes=0, token_bytes=TOKEN)
    # 256 pages and 6 of rings, against 512 blocks of 16 tokens.
    assert plain.gain(8192, 32, PAGE, 6) == pytest.approx(512 * 16 * TOKEN / (262 * PAGE))
    text, nothing = said(plain, 32, PAGE, 6, most=40000)
    assert text.endswith(
        "blocks of 32 tokens; requests held, times 16 bit: 4.5 at 1,024, 5.2 at "
        "8,192, 5.3 at 32,768"
    )
    assert not nothing


def test_a_state_makes_blocks_long_and_short_requests_gain_nothing() -> None:
    # Qwen3.5: 10 layers of 2 heads of 256, 30 states of 2,146,304 bytes.
    token = 2 * 2 * 256 * 2
    hybrid = Layers(10, 0, (), 30, 2_146_304, token)
    page = 5600 * 2 * 192
    gains = [hybrid.gain(x, 5600, page, 1) for x in (1024, 8192, 32768)]
    assert gains[0] < 1 < gains[1] < gains[2]
    assert gains[2] == pytest.approx(
        (10 * 31 + 30) * 1056 * token / ((10 * 7 + 30) * page), rel=0.03
    )


def test_where_few_bits_gain_nothing_it_is_said() -> None:
    hybrid = Layers(10, 0, (), 30, 2_146_304, 2 * 2 * 256 * 2)
    assert said(hybrid, 5600, 5600 * 2 * 192, 1, most=2048)[1]
    assert not said(hybrid, 5600, 5600 * 2 * 192, 1, most=32768)[1]
    # Windows stay in 16 bit: what they hold is no gain.
    windows = Layers(1, 0, (1024,) * 40, 0, 0, TOKEN)
    text, nothing = said(windows, 192, 192 * 8 * 96, 1, most=512)
    assert nothing
    assert "at 512" in text
