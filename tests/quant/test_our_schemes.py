from dataclasses import replace

import pytest

from duotone import scheme
from duotone.attention.cuda.spans import layout
from duotone.quant.our_schemes import PARTS, TILE, Part, Parts, with_pictures
from duotone.quant.schemes import named

FOREGROUND = {"foreground", "short_foreground", "foreground_multiple"}
VISUAL = {"visual", "background", *FOREGROUND, "tau", "ranges", "layers"}


@pytest.mark.parametrize(("bits", "recent"), [(2, 96), (4, 32)])
@pytest.mark.parametrize("pictures", [1, 2, 8])
def test_mixed_has_the_pictures_of_duotone_beside_the_text_of_a_stream(
    bits: int, recent: int, pictures: int
) -> None:
    mixed = scheme("duotone-mixed", bits=bits, pictures=pictures)
    text, ours = scheme("duotone-stream", bits=bits), scheme("duotone", bits=pictures)
    assert {name: mixed.to_dict()[name] for name in VISUAL} == {
        name: ours.to_dict()[name] for name in VISUAL
    }
    assert (mixed.text, mixed.sink, mixed.recent) == (text.text, text.sink, recent)


def test_mixed_has_pictures_at_2_bits_unless_told_otherwise() -> None:
    assert scheme("duotone-mixed") == scheme("duotone-mixed", bits=4, pictures=2)
    assert named("duotone-mixed@2") == scheme("duotone-mixed", bits=2, pictures=2)


@pytest.mark.parametrize("pictures", [0, 5, 16, True, 2.0, "2", None, [2]])
def test_pictures_of_a_width_without_codes_are_refused(pictures: object) -> None:
    with pytest.raises(ValueError, match=r"pictures must be one of \(1, 2, 3, 4, 8\)"):
        scheme("duotone-mixed", pictures=pictures)


def test_short_spans_keep_their_share_in_another_text() -> None:
    pictures = replace(PARTS[1], share=0.5, short=(128, 0.3)).spec
    spec = with_pictures(scheme("duotone-stream"), pictures)
    assert spec.foreground_of(100) == 30
    assert spec.foreground_of(200) == pictures.foreground_of(200) == 128


def test_calibrated_scores_stay_beside_another_text() -> None:
    pictures = scheme("calibquant", bits=1)
    spec = with_pictures(scheme("duotone-mixed"), pictures)
    assert spec.tau == pictures.tau == (0.0, 3.0)
    assert (spec.background, spec.layers) == (None, ())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_long_spans_fill_tiles_in_front(bits: int) -> None:
    spec = scheme("duotone", bits=bits)
    assert spec.foreground_multiple == TILE == layout.TILE
    for tokens in (128, 196, 256, 576, 3328):
        front = spec.foreground_of(tokens)
        assert front % TILE == 0
        assert abs(front - spec.foreground * tokens) <= 32


def test_the_first_packed_layer_has_a_background_of_its_own() -> None:
    spec = scheme("duotone", bits=1)
    first, second = (spec.at_layer(layer).background for layer in (0, 1))
    assert (first.key.bits, first.key.classes, first.key.gain) == (2, None, 1.1)
    assert (first.value, second) == (spec.background.value, spec.background)
    assert second.key.gain == "fit"
    other = replace(PARTS[1], first_gains=None).spec.at_layer(0).background
    assert (other.key.gain, other.value.gain) == PARTS[1].gains


def test_short_spans_may_have_several_steps() -> None:
    spec = replace(PARTS[1], short=((60, 0.08), (128, 1.0))).spec
    assert [spec.foreground_of(tokens) for tokens in (49, 64, 256)] == [4, 64, 64]
    mixed = with_pictures(scheme("duotone-stream"), spec)
    assert mixed.short_foreground == spec.short_foreground == ((60, 0.08), (128, 1.0))


def test_one_pair_for_short_spans_is_written_alone() -> None:
    assert replace(PARTS[1], short=(60, 0.08)).spec.to_dict()["short_foreground"] == (60, 0.08)


@pytest.mark.parametrize("bits", [1, 2])
def test_presets_keep_spans_of_60_to_111_tokens_in_one_part(bits: int) -> None:
    spec = scheme("duotone", bits=bits)
    front = {tokens: spec.foreground_of(tokens) for tokens in (59, 60, 64, 100, 111, 112, 128)}
    undivided = [tokens for tokens, in_front in front.items() if tokens == in_front]
    assert undivided == [60, 64, 100, 111]


def test_parts_without_a_back_are_whole_spans() -> None:
    spec = Parts(Part(2, ((4, 1 / 2), (1, 1 / 2))), gains=("fit", 1.2)).spec
    assert (spec.background, spec.layers) == (None, ())
    assert (spec.visual.key.bits, spec.visual.key.gain, spec.visual.value.gain) == (2, "fit", 1.2)
    assert spec.visual.value.classes == ((4, 0.5), (1, 0.5))
