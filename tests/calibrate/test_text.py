"""Text beside calibrated pictures: calibrated, or of another scheme that can stand there."""

import pytest
import torch

import duotone
from duotone.calibrate import CalibrationBatch, Settings, calibrate, compare
from duotone.calibrate.text import (
    check_has_pictures,
    check_text,
    joined,
    text_settings,
    written_data,
)
from duotone.calibrate.written import Written
from duotone.hf.model.facts import model_facts
from duotone.hf.model.spec_checks import check_spec
from duotone.loading import Loaded
from duotone.quant import CacheSpec, KVSpec, LayerRule, TensorSpec
from duotone.quant.our_schemes import with_pictures
from tiny_text import text_model
from tiny_vlm import TinyProcessor, pictured, tiny_model

STREAMS = ("kivi", "innerq", "duotone-stream")
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


def test_calibrated_text_is_named_with_its_code_bits():
    settings = Settings(1.0, 0.1, group=32, recent=16)
    expected = Settings(1.5, group=32, recent=16, text=True)
    assert text_settings("calibrated@1.5", settings) == expected
    assert text_settings("calibrated", settings).bits == 2
    assert text_settings("duotone-mixed@4", settings) is None
    assert text_settings("calibrated.json", settings) is None
    with pytest.raises(ValueError, match=r"e\.g\. calibrated@1\.5; got 'calibrated@few'"):
        text_settings("calibrated@few", settings)


def policy(bits):
    return KVSpec(TensorSpec(bits), TensorSpec(bits))


PICTURES = CacheSpec(
    visual=policy(4),
    background=policy(1),
    foreground=0.4,
    ranges="run",
    layers=(LayerRule(0, 1, background=policy(2)), LayerRule(3, 4, visual=policy(8))),
)
TEXT = CacheSpec(
    visual="text",
    text=KVSpec(TensorSpec(2, group=64), TensorSpec(2, group=64)),
    sink=4,
    recent=32,
    layers=(LayerRule(3, None, text=KVSpec(TensorSpec(4, group=64), TensorSpec(1, group=64))),),
)


def test_halves_are_joined_layer_by_layer():
    spec = joined(TEXT, PICTURES, 5)
    assert (spec.sink, spec.recent, spec.ranges, spec.foreground) == (4, 32, "run", 0.4)
    for layer in range(5):
        at, words, spans = (s.at_layer(layer) for s in (spec, TEXT, PICTURES))
        assert (at.text, at.visual, at.background) == (words.text, spans.visual, spans.background)
    assert joined(TEXT.replace(layers=()), PICTURES.replace(layers=()), 5).layers == ()


@pytest.mark.parametrize("name", ["kivi", "innerq", "duotone-stream"])
def test_a_preset_in_the_place_of_calibrated_text_is_joined(name):
    preset = duotone.scheme(name, bits=2)
    spec = joined(preset, PICTURES, 5)
    assert spec.at_layer(3).visual == policy(8)
    assert {spec.at_layer(layer).text for layer in range(5)} == {preset.text}
    same = ("sink", "recent", "flush", "key_norm")
    assert [getattr(spec, n) for n in same] == [getattr(preset, n) for n in same]


def test_text_of_a_model_with_pictures_ends_with_a_comparison_of_its_own():
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    settings = text_settings("calibrated", Settings())
    data = written_data(loaded, Written(128), settings, samples=4, heldout=4)
    bases, found, report = calibrate(loaded, data.batches, settings, file="text.safetensors")
    end, _ = compare(loaded, bases, found, data.heldout)
    assert (end.tasks, end.samples) == (("written",), 4)
    assert end.found.packed > 0.6
    assert all(one.label.split(" @")[0] in STREAMS for one in (end.rival, *end.others))
    spec = joined(found, PICTURES.replace(layers=PICTURES.layers[:1]), 3)
    check_spec(model_facts(loaded.model), spec.replace(layers=()))
    assert report["header"]["settings"]["text"]


def test_text_that_would_never_be_packed_is_refused_before_the_model_reads_it():
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    with pytest.raises(ValueError, match=r"packs nothing below 100 tokens; .* has 94"):
        written_data(loaded, Written(30), Settings(text=True), samples=1)
    with pytest.raises(ValueError, match="bits per channel"):
        written_data(loaded, Written(128), Settings(bits=9, text=True), samples=1)
