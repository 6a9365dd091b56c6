"""Prompts that are tensors or a text: checked, padded, cut."""

import pytest
import torch
from safetensors.torch import save_file

import duotone
from duotone.inference.batch import generate, make_cache, prepare
from duotone.inference.encoded import EncodedPrompts, TextFile
from duotone.loading import Loaded
from tiny_text import LetterTokenizer, text_model


@pytest.fixture(scope="module")
def model():
    return text_model()


def embedded(model, *lengths, visual=slice(2, 8)):
    prompts = []
    for seed, length in enumerate(lengths):
        ids = torch.randint(0, 32, (length,), generator=torch.Generator().manual_seed(seed))
        mask = torch.zeros(length, dtype=torch.bool)
        mask[visual] = True
        prompts.append({"inputs_embeds": model.get_input_embeddings()(ids).detach(),
                        "visual_mask": mask})  # fmt: skip
    return EncodedPrompts("mine", tuple(prompts), 4)


def test_batches_are_padded_on_the_left(model):
    first, second = embedded(model, 10, 12, 9).batches(3, 2)
    assert first["inputs_embeds"].shape == (2, 12, 32)
    assert first["attention_mask"].sum(1).tolist() == [10, 12]
    assert first["attention_mask"][0].tolist() == [0, 0, *[1] * 10]
    assert first["visual_mask"][0].nonzero().flatten().tolist() == [4, 5, 6, 7, 8, 9]
    assert second["inputs_embeds"].shape == (1, 9, 32)


def test_embeddings_answer_as_their_ids_do(model):
    ids = torch.arange(12) % 7 + 3
    by_ids = EncodedPrompts("ids", ({"input_ids": ids},))
    by_embeds = EncodedPrompts("embeds", ({"inputs_embeds": model.get_input_embeddings()(ids)},))
    answers = []
    for prompts in (by_ids, by_embeds):
        batch = prepare(model, prompts.batches(1, 1)[0])
        answers.append(generate(model, batch, make_cache(model, None, batch), 5).token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("scheme", ["duotone", "duotone-whole", "duotone-mixed"])
def test_a_text_model_packs_the_tokens_that_a_mask_calls_visual(model, scheme):
    batch = prepare(model, embedded(model, 40, visual=slice(4, 36)).batches(1, 1)[0])
    cache = make_cache(model, duotone.scheme(scheme), batch)
    generate(model, batch, cache, 4)
    state = cache.ledger.state
    assert int((state.visual.lengths + state.background.lengths).sum()) == 32
    none = prepare(model, embedded(model, 40, visual=slice(0, 0)).batches(1, 1)[0])
    with pytest.raises(ValueError, match="quantizes visual tokens only"):
        make_cache(model, duotone.scheme("duotone"), none)


def test_the_key_of_a_prompt_is_its_picture(model):
    prompts = embedded(model, 12, 12)
    changed = dict(prompts.prompts[0])
    changed["inputs_embeds"] = changed["inputs_embeds"].clone()
    changed["inputs_embeds"][-1] += 1  # another question about the same picture
    same = EncodedPrompts("same", (changed, *prompts.prompts))
    assert same.key(0) == same.key(1) != same.key(2)


BAD = {
    "nothing": {},
    "both": {"input_ids": torch.zeros(3), "inputs_embeds": torch.zeros(3, 2)},
    "a batch": {"inputs_embeds": torch.zeros(1, 3, 2)},
    "another length": {"inputs_embeds": torch.zeros(3, 2), "visual_mask": torch.zeros(4)},
    "another name": {"input_ids": torch.zeros(3), "pixels": torch.zeros(3)},
}


@pytest.mark.parametrize("name", BAD)
def test_other_tensors_are_refused(name):
    with pytest.raises(ValueError, match="a prompt has inputs_embeds"):
        EncodedPrompts("bad", (BAD[name],))


def test_prompts_are_there_and_alike():
    ids = {"input_ids": torch.zeros(3)}
    with pytest.raises(ValueError, match="must have prompts, all with the same tensors"):
        EncodedPrompts("none", ())
    with pytest.raises(ValueError, match="all with the same tensors"):
        EncodedPrompts("mixed", (ids, ids | {"visual_mask": torch.zeros(3)}))
    with pytest.raises(ValueError, match="between 1 and the 1 prompts of 'one'"):
        EncodedPrompts("one", (ids,)).check_samples(2)


def test_a_file_comes_back(model, tmp_path):
    prompts = embedded(model, 10, 12)
    tensors = {f"{i}.{k}": t for i, p in enumerate(prompts.prompts) for k, t in p.items()}
    save_file(tensors, tmp_path / "mine.safetensors")
    loaded = EncodedPrompts.load(tmp_path / "mine.safetensors", 4)
    assert (loaded.name, loaded.fingerprint) == ("mine", prompts.fingerprint)
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("text")
    for name in ("other", "text"):
        with pytest.raises(ValueError, match="must be a safetensors file of tensors"):
            EncodedPrompts.load(tmp_path / f"{name}.safetensors")


def test_a_text_is_cut_into_stretches_that_the_model_can_read():
    loaded = Loaded("words", text_model(max_position_embeddings=40), LetterTokenizer())
    text = TextFile("story", "once upon a time " * 10, context=20, max_new_tokens=8)
    assert [len(p["input_ids"]) for p in text.encoded(loaded).prompts] == [20] * 8
    wide = TextFile("story", text.text, max_new_tokens=8).encoded(loaded)
    assert [len(p["input_ids"]) for p in wide.prompts] == [32] * 5
    with pytest.raises(ValueError, match="a stretch of 20 tokens, got 3 tokens"):
        TextFile("short", "abc", context=20, max_new_tokens=8).encoded(loaded)
