"""Recipes with rules and a quantized head: bits by linear and by part, saved, loaded, run."""

import copy

import pytest
import torch

import duotone
from duotone.hf.weights.checkpoint import load, save
from duotone.hf.weights.compressed_tensors import check_expressible, export
from duotone.hf.weights.fusion import unfused
from duotone.loading import visual_mask
from duotone.quantize import CalibrationSet, quantize_model
from duotone.weights.methods.recipe import get_recipe
from duotone.weights.methods.rtn import round_to_nearest
from duotone.weights.methods.rule import LinearRule
from duotone.weights.modules.fused import Fused
from duotone.weights.modules.quant_linear import QuantLinear

from families import inputs, tiny_model
from mquant_setups import quantized, tiny_data, tiny_loaded

KEPT = LinearRule("*.layers.1.*", ("language",), bits=16)
MIXED = (
    *get_recipe("mquant-head8-w4a8").rules,
    LinearRule("*", ("vision",), bits=8, clip=False),
    LinearRule("mlp_output", ("language",), activation="dynamic"),
    LinearRule("attention_output", ("language",), activation="none"),
)


def kinds(model):
    """{path: (mode, activation, scales)} of the quantized linears."""
    return {
        n: (m.mode, m.activation, 0 if m.scales is None else len(m.scales))
        for n, m in model.named_modules()
        if isinstance(m, QuantLinear)
    }


def data_of(name, seed):
    prompts = [[3, 4], [2]] if name == "qwen3" else [[3, "image", 4], ["image", 2]]
    return inputs(name, prompts, seed)


def logits(model, given):
    with torch.no_grad():
        found = model(**given).logits
    return found[given["attention_mask"].bool()]


def mixed(name="mquant-w4a8", **changes):
    return quantized(name, **{"rules": MIXED, "parts": (*get_recipe(name).parts, "head")} | changes)


def prompt(loaded):
    from duotone.inference.batch import encode
    from tiny_vlm import tiny_example

    return encode(loaded.processor, [tiny_example("heldout", i).messages() for i in (1, 8)])


def test_every_linear_has_the_bits_of_its_rule_and_a_checkpoint_keeps_them(tmp_path):
    loaded, report = mixed()
    found = kinds(loaded.model)
    layer = "model.language_model.layers.0"
    assert found[f"{layer}.mlp.down_proj"] == ("w4a8", "dynamic", 0)
    assert found[f"{layer}.mlp.up_proj"] == ("w4a8", "static", 2)
    assert found[f"{layer}.self_attn.o_proj"] == ("w4a16", "none", 0)
    assert found["lm_head"] == ("w8a8", "dynamic", 0)
    vision = {kind for path, kind in found.items() if "vision" in path}
    assert vision == {("w8a8", "static", 1)}
    assert {line["linear"]: line["mode"] for line in report["linears"]} == {
        path: mode for path, (mode, _, _) in found.items()
    }
    given = prompt(loaded)
    with torch.no_grad():
        wanted = loaded.model(**given).logits
        again = load(save(loaded.model, tmp_path / "q"))
        assert torch.equal(again(**given).logits, wanted)
    assert kinds(again) == found
    before, after = report["bytes"]["before"], report["bytes"]["after"]
    # Tied before; the rotation gives the head its own weight, of which rules make 8 bits.
    assert (before["head"], after["embedding"]) == (0, before["embedding"])
    assert 0 < after["head"] < before["embedding"] / 2


def test_outputs_per_token_leave_what_follows_norms_static():
    """With heads mixed online, V is not rotated and o_proj has a transform of its own."""
    for name, online in (("mquant-outputs", False), ("mquant-heads-outputs", True)):
        found, _ = quantized(f"{name}-per-token-w8a8")
        layer = found.model.model.language_model.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        assert [m.activation for m in (attention.o_proj, mlp.down_proj)] == ["dynamic"] * 2
        assert [len(m.scales) for m in (attention.q_proj, mlp.up_proj)] == [2, 2]
        assert (attention.o_proj.plan is not None) is online
        wanted = logits(tiny_loaded().model, prompt(found))
        assert (logits(found.model, prompt(found)) - wanted).norm() < 0.15 * wanted.norm()


def test_a_linear_of_16_bits_stays_the_models_own():
    loaded, _ = quantized("rtn-w8a8", rules=(KEPT,))
    plain = tiny_loaded().model
    left = {n for n, m in loaded.model.named_modules() if isinstance(m, torch.nn.Linear)}
    inside = {n for n in left if "layers.1." in n and "language" in n}
    assert left == inside | {"lm_head"}
    assert len(inside) == 7
    for name in inside:
        weight = loaded.model.get_submodule(name).weight
        assert torch.equal(weight, plain.get_submodule(name).weight)


def test_a_head_is_rounded_by_rows_and_runs_under_caches_of_few_bits():
    loaded, report = quantized(
        "rtn-w8a8", rules=get_recipe("mquant-head8-w4a8").rules, parts=("head",)
    )
    head = loaded.model.lm_head
    codes, scale = round_to_nearest(tiny_loaded().model.lm_head.weight, 8)
    assert torch.equal(head.packed.dequantized(), codes * scale[:, None])
    (line,) = report["linears"]
    text = [
        batch["attention_mask"].bool() & ~visual_mask(loaded.model.config, batch["input_ids"])
        for batch in tiny_data(tiny_loaded()).batches
    ]
    assert (line["linear"], line["part"]) == ("lm_head", "head")
    assert line["tokens"]["text"] == sum(int(mask.sum()) for mask in text) > 0
    with duotone.enable(loaded.model, duotone.scheme("duotone")) as session:
        loaded.model.generate(**prompt(loaded), max_new_tokens=3, do_sample=False)
    assert session.memory().total_bytes > 0


def test_a_static_head_with_gptq_is_calibrated_on_text():
    loaded, report = quantized("mquant-w8a8", parts=("language", "head"))
    line = report["linears"][-1]
    assert line["linear"] == "lm_head"
    assert line["error"] <= line["error_rtn"]
    assert kinds(loaded.model)["lm_head"] == ("w8a8", "static", 1)
    assert list(line["largest"]) == ["text"]


def test_readers_of_one_norm_may_differ():
    """Fused modules take gate and up of two widths, and leave a norm whose readers differ alone."""
    rules = (
        LinearRule("*.language_model.*.gate_proj", bits=8),
        LinearRule("*.language_model.*.q_proj", activation="none"),
        LinearRule("*.language_model.layers.1.*.up_proj", bits=16),
    )
    loaded, _ = quantized("mquant-w4a8", rules=rules)
    layers = loaded.model.model.language_model.layers
    fused = [isinstance(layer.post_attention_layernorm, Fused) for layer in layers]
    assert fused[:2] == [True, False]
    assert not any(isinstance(layer.input_layernorm, Fused) for layer in layers)
    given = prompt(loaded)
    found = logits(loaded.model, given)
    with unfused(loaded.model):
        assert torch.equal(logits(loaded.model, given), found)
    wanted = logits(tiny_loaded().model, given)
    assert (found - wanted).norm() < 0.8 * wanted.norm()


def test_what_no_rule_can_mean_is_refused_before_any_work(tmp_path):
    loaded = tiny_loaded()
    data = tiny_data(loaded)
    for rule in (LinearRule("*.fc3", bits=8), LinearRule("projector", ("vision",), bits=8)):
        recipe = get_recipe("rtn-w8a8").replace(rules=(rule,))
        with pytest.raises(ValueError, match="a rule must cover a linear of its parts, got"):
            quantize_model(loaded.model, recipe, data, partial=tmp_path / "p")
    # Parts that are not quantized have nothing to cover.
    recipe = get_recipe("mquant-vision8-w4a8").replace(parts=("language",))
    quantize_model(loaded.model, recipe, data)
    assert not (tmp_path / "p").exists()


def test_mixed_models_have_no_compressed_tensors(tmp_path):
    with pytest.raises(ValueError, match="whose linears are alike and whose head is not"):
        check_expressible(get_recipe("rtn-w8a8").replace(rules=(KEPT,)))
    with pytest.raises(ValueError, match="whose head is not"):
        check_expressible(get_recipe("rtn-w8a8").replace(parts=("language", "head")))
    rule = LinearRule("mlp_output", activation="dynamic")
    loaded, _ = quantized("rtn-w8a8", rules=(rule,))
    with pytest.raises(ValueError, match=r"got 'model.*down_proj' and|got 'model.*fc2' and"):
        export(loaded.model, tmp_path / "out")


@pytest.mark.parametrize("name", ["mquant-w4a8", "awq-w4a8"])
def test_an_interrupted_mixed_run_goes_on(name, tmp_path):
    """AWQ's factors go into the linears that stay 16 bit, too."""
    kept_query = LinearRule("*.language_model.*.q_proj", bits=16)
    rules = (LinearRule("mlp_input", ("language",), bits=16), kept_query, *MIXED[:1])
    recipe = get_recipe(name).replace(rules=rules, parts=("language", "head"))
    wanted, kept = tiny_loaded(), tmp_path / "partial"
    quantize_model(wanted.model, recipe, tiny_data(wanted))
    first = tiny_loaded()

    def stop(done, total):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(first.model, recipe, tiny_data(first), partial=kept, progress=stop)
    again = tiny_loaded()
    quantize_model(again.model, recipe, tiny_data(again), partial=kept)
    given = prompt(wanted)
    with torch.no_grad():
        assert torch.equal(again.model(**given).logits, wanted.model(**given).logits)


@pytest.mark.parametrize("name", ["llava", "internvl", "qwen2_5_vl", "glm4v", "qwen3"])
def test_real_families_take_mixed_parts(name, tmp_path):
    """Also with tied heads: the embedding stays, the head has codes of its own."""
    plain = tiny_model(name)
    model = copy.deepcopy(plain)
    data = CalibrationSet([data_of(name, seed) for seed in (1, 2, 3)], {}, [])
    recipe = get_recipe("mquant-w8a8").replace(rules=MIXED, parts=("vision", "language", "head"))
    quantize_model(model, recipe, data)
    given = data_of(name, 1)
    found = logits(model, given)
    wanted = logits(plain, given)
    assert (found - wanted).norm() < 0.25 * wanted.norm()
    assert kinds(model)["lm_head"] == ("w8a8", "dynamic", 0)
    assert model.config.tie_word_embeddings is False
    assert torch.equal(logits(load(save(model, tmp_path / "q")), given), found)
