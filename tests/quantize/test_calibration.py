import pytest
import torch

from duotone.loading import Loaded, visual_mask
from duotone.quantize.calibration import appended, check_pictures
from duotone.quantize.disjoint import check_disjoint, content_hash
from tiny_vlm import TINY_TASK, VISUAL_TOKENS, tiny_example

from mquant_setups import tiny_data, tiny_loaded


def test_answers_stand_behind_their_prompts():
    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    encoded = {"input_ids": ids, "attention_mask": (ids != 0).long(), "pixel_values": torch.ones(2)}
    encoded["mm_token_type_ids"] = torch.tensor([[0, 2, 2], [0, 2, 0]])
    found = appended(encoded, [[1, 2], [3]])
    assert found["input_ids"].tolist() == [[5, 6, 1, 2], [7, 8, 9, 3]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert found["mm_token_type_ids"].tolist() == [[2, 2, 0, 0], [0, 2, 0, 0]]
    assert found["pixel_values"] is encoded["pixel_values"]


def test_shorter_samples_are_padded_on_the_left():
    ids = torch.tensor([[0, 0, 5], [7, 8, 9]])
    found = appended({"input_ids": ids, "attention_mask": (ids != 0).long()}, [[1], [3, 4]])
    assert found["input_ids"].tolist() == [[0, 0, 0, 5, 1], [7, 8, 9, 3, 4]]
    assert found["attention_mask"].tolist() == [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]


def test_a_set_knows_its_samples_and_its_visual_tokens():
    loaded = tiny_loaded()
    data = tiny_data(loaded)
    assert len(data.batches) == 2
    assert len(data.hashes) == 4
    masks = [visual_mask(loaded.model.config, batch["input_ids"]) for batch in data.batches]
    assert [int(mask.sum()) for mask in masks] == [3 * VISUAL_TOKENS] * 2
    assert tiny_data(loaded).digest() == data.digest() != tiny_data(loaded, 3).digest()


def test_content_counts_not_names():
    one, same, other = tiny_example("a", 1), tiny_example("b", 1), tiny_example("a", 2)
    assert content_hash(one) == content_hash(same) != content_hash(other)


def test_data_in_both_sets_are_named():
    data = tiny_data(tiny_loaded())
    check_disjoint(data.hashes, [tiny_example("heldout", i) for i in range(4, 9)])
    with pytest.raises(ValueError, match=r"got 1 samples in both: heldout-3 \(calibrated on as"):
        check_disjoint(data.hashes, [tiny_example("heldout", i) for i in range(3, 9)])


def test_more_samples_than_there_are_and_samples_without_pictures_are_refused():
    loaded: Loaded = tiny_loaded()
    with pytest.raises(ValueError, match="samples must be between 1"):
        tiny_data(loaded, 21)
    with pytest.raises(ValueError, match="needs pictures to calibrate on"):
        check_pictures(loaded, TINY_TASK, [tiny_example("calibration", 0).without_images()])
