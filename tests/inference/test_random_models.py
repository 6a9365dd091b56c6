"""Random models of shapes and configurations, and prompts for them."""

import pytest
import torch

from duotone.inference.random_models import (
    UNEQUAL,
    image_id,
    left_padded,
    marked_prompt,
    random_model,
    random_model_of,
    random_prompt,
    short_prompt,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> torch.nn.Module:
    return random_model("tiny", CPU, torch.float32)


def test_weights_are_drawn_alike_every_time(tiny: torch.nn.Module) -> None:
    again = random_model_of(tiny.config, CPU, torch.float32)
    assert type(again) is type(tiny)
    assert not again.training
    ours, theirs = tiny.state_dict(), again.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())


def test_a_prompt_is_text_around_as_many_tiles_as_fit(tiny: torch.nn.Module) -> None:
    given = random_prompt("tiny", tiny, batch=3, tokens=70)
    ids, image = given["input_ids"], image_id("tiny")
    assert ids.shape == (3, 70)
    assert (ids == image).sum(1).tolist() == [3 * 16] * 3
    assert not (ids[:, :11] == image).any()
    assert not (ids[:, -11:] == image).any()
    assert len(given["pixel_values"]) == 9
    assert given["attention_mask"].all()


def test_a_short_prompt_is_one_tile(tiny: torch.nn.Module) -> None:
    given = short_prompt("tiny", tiny)
    assert len(given["pixel_values"]) == 1
    assert tiny(**given).logits.isfinite().all()


def test_padded_prompts_lose_their_last_text(tiny: torch.nn.Module) -> None:
    given = random_prompt("tiny", tiny, batch=9, tokens=70)
    made = left_padded(given, pad=2)
    assert given["attention_mask"].all()
    for row in range(9):
        missing = row % UNEQUAL
        assert made["attention_mask"][row].tolist() == [0] * missing + [1] * (70 - missing)
        assert made["input_ids"][row, :missing].eq(2).all()
        assert made["input_ids"][row, missing:].equal(given["input_ids"][row, : 70 - missing])
    same = made["input_ids"] == image_id("tiny")
    assert same.sum() == (given["input_ids"] == image_id("tiny")).sum()
    assert made["pixel_values"] is given["pixel_values"]


def test_words_may_count_as_visual(tiny: torch.nn.Module) -> None:
    given, mask = marked_prompt(tiny, batch=2, tokens=50)
    assert not (given["input_ids"] == image_id("tiny")).any()
    assert mask.tolist() == [[False] * 8 + [True] * 34 + [False] * 8] * 2


def test_words_may_count_as_several_pictures(tiny: torch.nn.Module) -> None:
    _, mask = marked_prompt(tiny, batch=1, tokens=40, picture=9)
    pictures = [*[True] * 9, False] * 2 + [True] * 4
    assert mask.tolist() == [[False] * 8 + pictures + [False] * 8]


def test_text_alone_has_no_visual_tokens(tiny: torch.nn.Module) -> None:
    model = random_model_of(tiny.config.text_config, CPU, torch.float32)
    given, mask = marked_prompt(model, batch=1, tokens=20)
    assert mask is None
    assert model(**given).logits.isfinite().all()


def test_prompts_without_room_are_refused(tiny: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match="a tile of 16 visual tokens and 16 of text; got 31"):
        random_prompt("tiny", tiny, batch=1, tokens=31)
    with pytest.raises(ValueError, match="more than 16; got 16"):
        marked_prompt(tiny, batch=1, tokens=16)
