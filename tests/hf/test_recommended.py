"""`recommend` and `enable` without a spec: the first rule that fits, its bytes, said once."""

from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig

import duotone
from duotone.defaults import CONVERSATIONS, PICTURES, TEXT
from duotone.hf import recommended
from duotone.hf.model.facts import model_facts
from duotone.hf.recommended import SMALLER, Rule, recommend, say_once
from duotone.hf.weights.checkpoint import model_class
from duotone.quant.schemes import named

from families import FAMILIES, HYBRIDS, config_of, inputs, tiny_model


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommended, "_SAID", set())


@pytest.mark.parametrize("name", {**FAMILIES, **HYBRIDS})
def test_every_tested_family_has_the_first_rule_of_its_kind(name: str) -> None:
    family = {**FAMILIES, **HYBRIDS}[name]
    found = recommend(config_of(name))
    assert found.name == (CONVERSATIONS if family.is_multimodal else TEXT)
    assert found.spec == named(found.name)
    assert found.times_smaller > 1


@pytest.mark.parametrize("name", ["internvl", "llama"])
def test_enable_takes_it_and_says_so_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, chosen = tiny_model(name), duotone.recommend(tiny_model(name))
    given = inputs(name, [[3, "image", 9, 7]] if name == "internvl" else [[3, 9, 7]])
    answers = []
    for spec in (None, None, chosen.spec):
        with duotone.enable(model, *([] if spec is None else [spec])) as session:
            answers.append(model.generate(**given, max_new_tokens=5, do_sample=False))
        assert session.cache.spec == chosen.spec
    assert torch.equal(answers[0], answers[2])
    said = capsys.readouterr()
    line = f"duotone: {chosen.summary}; duotone.recommend(model) says why."
    if name == "internvl":
        line += f" {SMALLER}: duotone.calibrated(model, processor)."
    assert said.err == f"{line}\n"
    assert said.out == ""


def test_an_explicit_spec_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with duotone.enable(tiny_model("llama"), named(TEXT)):
        pass
    assert capsys.readouterr().err == ""


def test_text_with_marked_embeddings_has_a_scheme_of_pictures() -> None:
    model, mask = tiny_model("llama"), torch.zeros(1, 40, dtype=torch.bool)
    assert recommend(model, visual_mask=mask).name == TEXT
    mask[:, 5:30] = True
    chosen = recommend(model, visual_mask=mask)
    assert (chosen.name, chosen.usual.visual_tokens > 0) == (CONVERSATIONS, True)
    embeds = model.get_input_embeddings()(torch.randint(2, 60, (1, 40))).detach()
    with duotone.enable(model, visual_mask=mask) as session:
        model.generate(inputs_embeds=embeds, max_new_tokens=2, do_sample=False)
    assert session.cache.spec == chosen.spec
    state = session.cache.ledger.state
    assert (state.visual.lengths + state.background.lengths).tolist() == [25]
    with pytest.raises(ValueError, match="visual_mask"):
        recommend(model, visual_mask=mask[0])


def test_another_model_type_is_said_anew(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llama", "qwen2", "llama"):
        facts = model_facts(FAMILIES[name].config())
        say_once(recommend(facts), facts)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].split(" for ")[1] for line in lines] == ["llama", "qwen2"]


@pytest.mark.parametrize("name", ["internvl", "gemma3", "llama"])
def test_its_bytes_are_those_of_a_plan(name: str) -> None:
    found = recommend(tiny_model(name))
    counts = vars(found.usual)
    planned = duotone.plan(tiny_model(name), found.spec, **counts)
    assert found.token_bytes * found.usual.tokens == pytest.approx(planned.bytes_per_sequence)
    own = found.own_token_bytes * found.usual.tokens
    assert own == pytest.approx(planned.dense_equivalent_bytes)


def test_a_sequence_fits_the_models_positions_and_has_pictures_of_its_size() -> None:
    config = duotone.loading.load_config()
    usual = recommend(config).usual
    assert (usual.tokens, usual.visual_tokens, usual.images) == (4096, 3328, 13)
    config.text_config.max_position_embeddings = 1000
    usual = recommend(config).usual
    assert (usual.tokens, usual.visual_tokens, usual.images) == (1000, 812, 3)
    vars(config)["image_seq_length"] = None
    assert recommend(config).usual.images == 1


def test_heads_that_groups_do_not_divide_get_shorter_groups() -> None:
    config = LlamaConfig(
        hidden_size=160,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        intermediate_size=32,
        vocab_size=64,
    )
    found = recommend(config)
    assert found.spec.text.value.group == 16
    assert found.spec.text.key == named(TEXT).text.key
    assert any("head_dim, which is 80" in reason for reason in found.why)
    assert f"so {TEXT} with groups of channels that divide the heads" in found.why
    model = model_class(config).from_config(config).eval()
    with duotone.enable(model) as session:
        model.generate(torch.arange(1, 60)[None], max_new_tokens=120, do_sample=False)
    assert session.memory().codes_bytes > 0


def test_a_rule_that_the_facts_rule_out_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans with a background are no scheme for sliding windows."""
    parts = Rule("duotone@1", True, "the fewest bits")
    monkeypatch.setattr(recommended, "RULES", (parts, *recommended.RULES[1:]))
    facts = model_facts(FAMILIES["internvl"].config())
    assert recommend(facts).name == "duotone@1"
    windows = recommend(replace(facts, sliding=(True,) * facts.layers, window=64))
    assert windows.name == TEXT
    assert any("not duotone@1: spans with a background" in why for why in windows.why)


def test_a_window_that_takes_less_by_itself_is_said() -> None:
    config = FAMILIES["mistral"].config()
    config.sliding_window = 24
    found = recommend(config)
    assert found.times_smaller < 1
    assert "its own cache keeps 24 tokens and is no larger at this length" in found.why


def test_what_stays_as_it_is_is_said() -> None:
    said = {name: str(recommend(HYBRIDS[name].config())) for name in ("qwen3_5", "paligemma2")}
    assert "3 of 5 layers keep a state of fixed size" in said["qwen3_5"]
    assert "2 of 3 layers see a window alone and stay in 16 bit" in said["paligemma2"]
    assert "no kernel decodes it: scores are capped" in said["paligemma2"]


def test_where_no_rule_fits_all_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommended, "RULES", (Rule(PICTURES, False, ""),))
    with pytest.raises(ValueError, match=r"must fit the model; not duotone.*visual tokens only"):
        recommend(FAMILIES["llama"].config())


def test_a_refused_model_is_refused_as_ever() -> None:
    with pytest.raises(ValueError, match="'t5' is an encoder-decoder"):
        recommend(CONFIG_MAPPING["t5"]())
    with pytest.raises(ValueError, match="got a str"):
        recommend("llama")


def test_defaults_name_schemes_and_bits() -> None:
    for name in (PICTURES, CONVERSATIONS, TEXT):
        assert "@" in name
        named(name)
