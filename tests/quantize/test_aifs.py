"""Models quantized by an AIFS recipe: reordered always, by slices, saved, under all caches."""

import copy

import pytest
import torch

import duotone
from duotone.hf.weights import checkpoint as checkpoints
from duotone.hf.weights.modality import announced
from duotone.hf.weights.reorder import ATTRIBUTE
from duotone.hf.weights.weight_maps import FAMILIES as MAPPED
from duotone.inference.batch import ask_later, encode, generate, make_cache, prepare
from duotone.quantize import CalibrationSet, quantize_model
from duotone.weights.methods.recipe import get_recipe
from duotone.weights.modules.quant_linear import QuantLinear
from tiny_vlm import tiny_example

from families import MULTIMODAL, inputs, new_model, tiny_model
from mquant_setups import quantized, tiny_loaded

# Codes flip at the border between two where attention adds up in another order.
NEAR = 2e-2


@pytest.fixture(scope="module")
def aifs():
    return quantized("static-msq-aifs-w8a8")[0]


@pytest.fixture(scope="module")
def by_rows():
    return quantized("static-msq-w8a8")[0]


def prompt(loaded, *indices):
    return encode(loaded.processor, [tiny_example("heldout", i).messages() for i in indices])


def logits(model, given):
    with torch.no_grad():
        return model(**given).logits[given["attention_mask"].bool()]


def relative_error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def in_sequence(model):
    """The model, not reordered any more."""
    getattr(model, ATTRIBUTE).remove(model)
    return model


def told(model, given):
    """(logits, what all linears with two scales are told: whether visual rows come first, the cut).

    The cut is None where each row picks its scale.
    """
    seen, rows = set(), len(given["input_ids"])

    def hear(linear, _):
        visual = linear.modality.visual.view(rows, -1).int()
        first = torch.equal(visual.sort(dim=1, descending=True).values, visual)
        seen.add((first, linear.modality.first))

    linears = [m for m in model.modules() if isinstance(m, QuantLinear) and len(m.scales) == 2]
    hooks = [linear.register_forward_pre_hook(hear) for linear in linears]
    found = logits(model, given)
    for hook in hooks:
        hook.remove()
    return found, seen


@pytest.mark.parametrize("indices", [(0,), (1,), (1, 8)], ids=["one", "two pictures", "batch"])
def test_outputs_are_those_of_row_scales(aifs, by_rows, indices):
    given = prompt(aifs, *indices)
    wanted, sequence = told(by_rows.model, given)
    found, seen = told(aifs.model, given)
    assert relative_error(found, wanted) < NEAR
    assert sequence == {(False, None)}
    visual = int((given["input_ids"] == 2).sum())
    assert seen == {(True, visual if len(indices) == 1 else None)}


def test_a_padded_sequence_is_two_slices_too(aifs, by_rows):
    both = prompt(aifs, 0, 8)
    short = int(both["attention_mask"].sum(1).argmin())
    row = {k: both[k][short : short + 1] for k in ("input_ids", "attention_mask")}
    assert not row["attention_mask"].all()
    pixels = prompt(aifs, (0, 8)[short])["pixel_values"]
    given = row | {"pixel_values": pixels}
    found, seen = told(aifs.model, given)
    assert seen == {(True, int((row["input_ids"] == 2).sum()))}
    assert relative_error(found, logits(by_rows.model, given)) < NEAR


def test_the_language_model_alone_can_be_told_once_for_several_steps(aifs):
    given = prompt(aifs, 0)
    batch = prepare(aifs.model, given)
    decoder, modality = aifs.model.get_decoder(), aifs.model.duotone_quantization.modality
    with torch.no_grad():
        wanted = aifs.model.model(**given).last_hidden_state
        with modality.rows(batch.visual_mask):
            for _ in range(2):
                found = decoder(inputs_embeds=batch.model_inputs["inputs_embeds"])
                assert relative_error(found.last_hidden_state, wanted) < NEAR


def test_text_alone_is_not_reordered(aifs, by_rows):
    given = {"input_ids": torch.tensor([[3, 5, 7, 9]]), "attention_mask": torch.ones(1, 4).long()}
    found, seen = told(aifs.model, given)
    assert {cut for _, cut in seen} == {None}
    assert torch.equal(found, logits(by_rows.model, given))


def test_a_checkpoint_runs_reordered_as_it_did(aifs, tmp_path):
    folder = checkpoints.save(aifs.model, tmp_path / "q")
    again, given = checkpoints.load(folder), prompt(aifs, 1)
    assert hasattr(again, ATTRIBUTE)
    assert torch.equal(logits(again, given), logits(aifs.model, given))
    header = folder / checkpoints.HEADER
    assert '"visual_first": true' in header.read_text()
    # As versions without this field wrote it.
    header.write_text(header.read_text().replace('"visual_first": true,', ""))
    assert not hasattr(checkpoints.load(folder, waive=("checksum",)), ATTRIBUTE)


def test_a_deep_copy_has_hooks_of_its_own(aifs):
    copied, given = copy.deepcopy(aifs.model), prompt(aifs, 1)
    wanted = logits(aifs.model, given)
    batch = prepare(copied, given)
    with announced(copied, batch.visual_mask):
        found = copied(**batch.model_inputs).logits[given["attention_mask"].bool()]
    assert torch.equal(found, wanted)
    assert told(in_sequence(copied), given)[1] == {(False, None)}
    assert told(aifs.model, given)[1] == {(True, int(batch.visual_mask.sum()))}
    modalities = {id(m.modality) for m in copied.modules() if isinstance(m, QuantLinear)}
    assert modalities == {id(copied.duotone_quantization.modality)}
    assert not modalities & {id(aifs.model.duotone_quantization.modality)}


CACHES = [(None, False), ("calibquant", False), ("kivi", False), ("vl-cache", False)]
CACHES += [(None, True), ("calibquant", True)]


@pytest.mark.parametrize(("scheme", "later"), CACHES)
def test_answers_under_all_caches(aifs, by_rows, scheme, later):
    spec, answers = None if scheme is None else duotone.scheme(scheme), []
    for loaded in (aifs, by_rows):
        batch = prepare(loaded.model, prompt(loaded, 1, 8))
        batch = ask_later(batch) if later else batch
        cache = make_cache(loaded.model, spec, batch)
        answers.append(generate(loaded.model, batch, cache, 5).token_ids)
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_compiled_prompt_takes_its_order_from_outside_the_graph(aifs):
    given = prompt(aifs, 0)
    whole = torch.compile(aifs.model.model.language_model, backend="eager")
    visual = given["input_ids"] == 2
    embeds = prepare(aifs.model, given).model_inputs["inputs_embeds"]
    with torch.no_grad():
        wanted = aifs.model.model(**given).last_hidden_state
        with aifs.model.duotone_quantization.modality.rows(visual):
            found = whole(inputs_embeds=embeds, use_cache=False).last_hidden_state
    torch.compiler.reset()
    assert relative_error(found, wanted) < NEAR


@pytest.mark.parametrize("name", [n for n in MULTIMODAL if n in MAPPED])
def test_every_family_runs_reordered(name):
    recipe = get_recipe("static-msq-aifs-w8a8").replace(method="rtn", parts=("language",))
    model = new_model(name)
    data = [inputs(name, [[3, "image", 4], ["image", 2]], seed) for seed in (1, 2)]
    quantize_model(model, recipe, CalibrationSet(data, {}, []))
    found, seen = told(model, data[0])
    assert seen == {(True, None)}
    assert relative_error(found, logits(in_sequence(model), data[0])) < NEAR


def test_models_that_cannot_be_reordered_are_refused_before_any_work(tmp_path):
    recipe, kept = get_recipe("static-msq-aifs-w4a8"), tmp_path / "partial"
    flash, sliding = tiny_loaded().model, tiny_loaded().model
    flash.get_decoder().config._attn_implementation = "flash_attention_2"
    sliding.get_decoder().config.layer_types = ["sliding_attention"] * 3
    cases = [
        (tiny_model("llama"), "has no visual tokens"),
        (flash, "takes a mask"),
        (sliding, "has sliding windows"),
    ]
    for model, message in cases:
        with pytest.raises(ValueError, match=rf"{message}[\s\S]*take scales per row"):
            quantize_model(model, recipe, CalibrationSet([], {}, []), partial=kept)
        assert not kept.exists()


def test_another_attention_is_refused_before_the_vision_tower(aifs):
    model, ran = copy.deepcopy(aifs.model), []
    model.model.vision_tower.register_forward_hook(lambda *_: ran.append(1))
    model.get_decoder().config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="take scales per row"):
        logits(model, prompt(aifs, 0))
    assert not ran


def test_calibration_is_that_of_row_scales(aifs, by_rows):
    ours, theirs = (loaded.model.state_dict() for loaded in (aifs, by_rows))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_are_those_of_row_scales_on_a_gpu(aifs, dtype):
    model = copy.deepcopy(aifs.model).to("cuda", dtype)
    given = {n: t.to("cuda") for n, t in prompt(aifs, 1).items()}
    given["pixel_values"] = given["pixel_values"].to(dtype)
    found, seen = told(model, given)
    assert seen == {(True, int((given["input_ids"] == 2).sum()))}
    assert relative_error(found, logits(in_sequence(model), given)) < 5 * NEAR
