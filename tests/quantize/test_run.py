import copy

import pytest
import torch
import transformers

import duotone
from duotone.hf.weights.checkpoint import load, quantization_of, save
from duotone.hf.weights.fusion import fuse, is_fused, unfuse, unfused
from duotone.hf.weights.modality import announced
from duotone.hf.weights.reorder import visual_first
from duotone.inference.batch import encode, generate, make_cache, prepare
from duotone.quantize import quantize_model
from duotone.weights.methods.recipe import get_recipe
from duotone.weights.modules.quant_linear import QuantLinear

from mquant_setups import quantized, tiny_data, tiny_loaded

SEEN = (
    "mquant-w8a8",
    "mquant-w4a8",
    "mquant-w4a8-g128",
    "rtn-w8a8",
    "smoothquant-w8a8",
    "quarot-w8a8",
    "dynamic-w8a8",
    "w4a16-g128",
    "awq-w4a8",
    "awq-w4a16-g128",
)


def prompt(loaded, index=1):
    from tiny_vlm import tiny_example

    return encode(loaded.processor, [tiny_example("heldout", i).messages() for i in (index, 8)])


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


def relative_error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def mquant():
    """For tests that leave it as it is."""
    return quantized("mquant-w8a8")[0]


@pytest.mark.parametrize("name", SEEN)
def test_a_quantized_model_is_near_its_base(name):
    loaded, report = quantized(name, **({"group": 16} if name.endswith("g128") else {}))
    inputs = prompt(loaded)
    real = inputs["attention_mask"].bool()
    wanted = logits(tiny_loaded().model, inputs)[real]
    found = logits(loaded.model, inputs)[real]
    limit = 0.15 if name.endswith("w8a8") else 0.8
    assert relative_error(found, wanted) < limit
    linears = [m for m in loaded.model.modules() if isinstance(m, QuantLinear)]
    assert len(linears) == len(report["linears"]) == 6 + 2 + 3 * 7
    # 16-bit activations have nothing to fuse.
    assert is_fused(loaded.model) is ("a16" not in name)
    with unfused(loaded.model):
        assert torch.equal(logits(loaded.model, inputs)[real], found)
    before, after = report["bytes"]["before"], report["bytes"]["after"]
    assert after["language"] < before["language"] / 2


def test_text_and_pictures_have_their_own_scales_in_the_language_model_only(mquant):
    counts = {
        name: len(module.scales)
        for name, module in mquant.model.named_modules()
        if isinstance(module, QuantLinear)
    }
    assert {n for n, c in counts.items() if c == 2} == {n for n in counts if "language" in n}


def test_what_is_heard_or_has_scales_of_its_own_is_not_fused():
    loaded, _ = quantized("mquant-w8a8")
    inputs, layers = prompt(loaded), loaded.model.model.language_model.layers
    wanted, whole = logits(loaded.model, inputs), fuse(loaded.model)
    unfuse(loaded.model)
    assert not is_fused(loaded.model)
    heard = []
    hook = layers[0].input_layernorm.register_forward_hook(lambda *given: heard.append(given[2]))
    layers[0].mlp.register_forward_pre_hook(lambda *given: None)
    layers[1].mlp.gate_proj.scales *= 1.5
    root = "model.language_model.layers"
    left = {f"{root}.0.input_layernorm", f"{root}.0.mlp", f"{root}.1.post_attention_layernorm"}
    assert set(whole) - set(fuse(loaded.model)) == left
    found = logits(loaded.model, inputs)
    assert heard[0].is_floating_point()
    assert 0 < relative_error(found, wanted) < 0.1
    hook.remove()
    layers[1].mlp.gate_proj.scales /= 1.5
    with unfused(loaded.model):
        torch.testing.assert_close(logits(loaded.model, inputs), wanted)


def test_a_copy_of_a_fused_model_is_one():
    loaded, _ = quantized("mquant-w8a8")
    inputs = prompt(loaded)
    wanted = logits(loaded.model, inputs)
    again = copy.deepcopy(loaded.model)
    assert is_fused(again)
    for linear in (m for m in loaded.model.modules() if isinstance(m, QuantLinear)):
        linear.weight_scale.zero_()
    assert torch.equal(logits(again, inputs), wanted)
    half = again.to(torch.bfloat16)
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    assert relative_error(logits(half, inputs).float(), wanted) < 0.3


def test_embeddings_and_ids_give_the_same_and_unannounced_ones_are_refused(mquant):
    inputs = prompt(mquant)
    wanted = logits(mquant.model, inputs)
    batch = prepare(mquant.model, inputs)
    with announced(mquant.model, batch.visual_mask):
        torch.testing.assert_close(logits(mquant.model, batch.model_inputs), wanted)
    with pytest.raises(ValueError, match="must know its visual tokens"):
        logits(mquant.model, batch.model_inputs)


def test_hidden_states_are_those_of_the_whole_model(mquant):
    inputs = prompt(mquant)
    with torch.no_grad():
        whole = mquant.model(**inputs, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(mquant.model.model(**inputs).last_hidden_state, whole)


def test_a_turn_behind_a_cache_uses_its_own_part_of_the_mask(mquant):
    inputs = prompt(mquant)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    whole = logits(mquant.model, inputs)
    cut = ids.shape[1] - 3
    cache = transformers.DynamicCache(config=mquant.model.config)
    first = {"input_ids": ids[:, :cut], "attention_mask": mask[:, :cut]}
    with torch.no_grad():
        mquant.model(**first, pixel_values=inputs["pixel_values"], past_key_values=cache)
        rest = mquant.model(
            input_ids=ids[:, cut:],
            attention_mask=mask,
            past_key_values=cache,
            position_ids=torch.arange(cut, ids.shape[1])[None].expand(len(ids), -1),
        ).logits
    torch.testing.assert_close(rest[1], whole[1, cut:], rtol=1e-4, atol=1e-4)


def test_reordered_tokens_take_their_scales_along(mquant):
    inputs = prompt(mquant)
    real = inputs["attention_mask"].bool()
    wanted = logits(mquant.model, inputs)[real]
    with visual_first(mquant.model):
        found = logits(mquant.model, inputs)[real]
    assert relative_error(found, wanted) < 1e-3


@pytest.mark.parametrize("name", ["mquant-w4a8", "smoothquant-w8a8", "awq-w4a16-g128"])
def test_a_checkpoint_loads_as_the_same_model(name, tmp_path):
    loaded, report = quantized(name, **({"group": 16} if name.endswith("g128") else {}))
    save(loaded.model, tmp_path / "q", loaded.processor)
    again = load(tmp_path / "q")
    inputs = prompt(loaded)
    assert torch.equal(logits(again, inputs), logits(loaded.model, inputs))
    assert quantization_of(again).header["recipe"] == report["recipe"]


def test_checkpoints_that_are_none_are_refused(tmp_path):
    loaded, _ = quantized("rtn-w8a8")
    with pytest.raises(ValueError, match="only a quantized model"):
        save(tiny_loaded().model, tmp_path / "a")
    folder = save(loaded.model, tmp_path / "q")
    with pytest.raises(ValueError, match="new or empty folder"):
        save(loaded.model, folder)
    with pytest.raises(ValueError, match=r"was quantized in torch\.float32"):
        load(folder, torch.float16)
    header = folder / "duotone_weights.json"
    text = header.read_text()
    header.write_text(text.replace('"format": 2', '"format": 9'))
    with pytest.raises(ValueError, match="checkpoints of format 2"):
        load(folder)
    header.write_text(text.replace('"model.language_model.layers.0.mlp.up_proj"', '"lm_head"'))
    with pytest.raises(ValueError, match="is not what belongs to"):
        load(folder)
    with pytest.raises(ValueError, match="the checkpoint in"):
        load(folder, waive=("checksum",))


@pytest.mark.parametrize("scheme", ["duotone", "calibquant", "kivi", None])
def test_few_bit_caches_under_few_bit_weights(mquant, scheme):
    batch = prepare(mquant.model, prompt(mquant))
    spec = None if scheme is None else duotone.scheme(scheme)
    cache = make_cache(mquant.model, spec, batch)
    answers = generate(mquant.model, batch, cache, 5).token_ids
    assert all(1 <= len(ids) <= 5 for ids in answers)
    if spec is not None:
        with duotone.enable(mquant.model, spec) as session:
            mquant.model.generate(**prompt(mquant), max_new_tokens=3, do_sample=False)
        assert session.memory().total_bytes > 0


def stop_after(units):
    def progress(done, total):
        if done == units:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("name", ["mquant-w4a8", "awq-w4a8"])
def test_an_interrupted_run_goes_on_with_the_unit_it_was_at(name, tmp_path):
    recipe, said, seen = get_recipe(name), [], []
    wanted, report = quantized(name)
    loaded = tiny_loaded()
    kept = tmp_path / "partial"
    with pytest.raises(KeyboardInterrupt) as caught:
        quantize_model(
            loaded.model, recipe, tiny_data(loaded), partial=kept, progress=stop_after(3)
        )
    end = f"3 of 5 units are kept in {kept}; the same command goes on there"
    assert caught.value.__notes__ == [f"interrupted: {end}"]
    assert len(list(kept.glob("unit-*.safetensors"))) == 3
    again = tiny_loaded()
    found = quantize_model(
        again.model,
        recipe,
        tiny_data(again),
        partial=kept,
        say=said.append,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert said == [f"going on from {kept}: 3 of 5 units are done"]
    assert seen[-1] == (5, 5)
    assert found["linears"] == report["linears"]
    assert not kept.exists()
    inputs = prompt(wanted)
    assert torch.equal(logits(again.model, inputs), logits(wanted.model, inputs))


def test_a_partial_folder_of_something_else_is_refused(tmp_path):
    loaded, kept = tiny_loaded(), tmp_path / "partial"
    recipe = get_recipe("rtn-w8a8")
    with pytest.raises(KeyboardInterrupt):
        quantize_model(
            loaded.model, recipe, tiny_data(loaded), partial=kept, progress=stop_after(1)
        )
    other, changed = tiny_loaded(), recipe.replace(clip=True)
    with pytest.raises(ValueError, match=r"differs in recipe.*remove the folder to begin again"):
        quantize_model(other.model, changed, tiny_data(other), partial=kept)


def test_a_model_that_cannot_be_saved_is_not_lost(tmp_path):
    loaded, kept, recipe = tiny_loaded(), tmp_path / "partial", get_recipe("rtn-w8a8")

    def full():
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        quantize_model(loaded.model, recipe, tiny_data(loaded), partial=kept, finish=full)
    again, said = tiny_loaded(), []
    quantize_model(
        again.model,
        recipe,
        tiny_data(again),
        partial=kept,
        impl="reference",
        finish=lambda: said.append(kept.exists()),
    )
    assert said == [True]
    assert not kept.exists()
    found = [m.impl for m in again.model.modules() if isinstance(m, QuantLinear)]
    assert found == ["reference"] * len(found)
    assert torch.equal(logits(again.model, prompt(again)), logits(loaded.model, prompt(again)))


def test_what_cannot_be_quantized_is_refused_before_any_work(mquant, tmp_path):
    before = copy.deepcopy(mquant.model.state_dict())
    with pytest.raises(ValueError, match="is quantized already"):
        quantize_model(mquant.model, get_recipe("mquant-w4a8"), tiny_data(mquant))
    assert all(torch.equal(v, before[k]) for k, v in mquant.model.state_dict().items())
    loaded = tiny_loaded()
    data = tiny_data(loaded)
    loaded.model.double()
    with pytest.raises(ValueError, match=r"got a model in torch\.float64; load it with dtype"):
        quantize_model(loaded.model, get_recipe("rtn-w8a8"), data, partial=tmp_path / "p")
    assert not (tmp_path / "p").exists()
