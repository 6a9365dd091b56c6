"""Text of another scheme beside calibrated pictures is refused where it cannot stand."""

import pytest
import torch

import duotone
from duotone.calibrate import CalibrationBatch
from duotone.calibrate.text import check_has_pictures, check_text
from duotone.quant.our_schemes import with_pictures
from tiny_text import text_model
from tiny_vlm import pictured, tiny_model

MIXED = duotone.scheme("duotone-mixed", bits=4)


def test_text_has_one_quantizer_in_all_layers():
    check_text(MIXED)
    with pytest.raises(ValueError, match="must have one quantizer in all layers"):
        check_text(duotone.scheme("asymkv", lk=1, lv=1))


def test_layers_share_no_text_beside_pictures():
    with pytest.raises(ValueError, match="must have codes of its own in all layers"):
        check_text(duotone.scheme("xquant"))


@pytest.mark.parametrize("name", duotone.schemes())
def test_text_that_is_taken_stands_beside_pictures_in_two_parts(name):
    spec = duotone.scheme(name)
    try:
        check_text(spec)
    except ValueError:
        return
    pictures = duotone.scheme("duotone", bits=1)
    assert with_pictures(spec, pictures).background == pictures.background


def test_text_in_16_bit_is_none():
    with pytest.raises(ValueError, match="a scheme that quantizes text, got 'dense'"):
        check_text(duotone.scheme("duotone"))


def test_a_text_model_has_no_pictures():
    batch = CalibrationBatch({"input_ids": torch.ones(1, 8, dtype=torch.long)}, 2)
    with pytest.raises(ValueError, match="a model with pictures, got 'llama'"):
        check_has_pictures(text_model(), [batch], MIXED)


def test_a_model_has_to_take_the_text():
    batch = CalibrationBatch(dict(pictured([0])), 2)
    check_has_pictures(tiny_model(), [batch], MIXED)
    wide = MIXED.replace(text=MIXED.text.replace(value=MIXED.text.value.replace(group=12)))
    with pytest.raises(ValueError, match="head_dim"):
        check_has_pictures(tiny_model(), [batch], wide)
