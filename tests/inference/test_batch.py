import pytest
import torch

import duotone
from duotone.inference.batch import (
    Batch,
    ask_later,
    decode_answers,
    encode,
    generate,
    make_cache,
    prepare,
)
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def encoded():
    return encode(TinyProcessor(), [TINY_TASK.example(i).messages() for i in range(4)])


def plain_batch(model, encoded):
    """A batch without encoding the pictures first."""
    mask = encoded["input_ids"] == model.config.image_token_id
    return Batch(encoded, mask, encoded["attention_mask"])


@pytest.mark.parametrize("scheme", [None, "duotone", "calibquant"])
def test_pictures_encoded_once_give_the_same_answers(model, encoded, scheme):
    spec = duotone.scheme(scheme) if scheme else None
    answers = []
    for batch in (prepare(model, encoded), plain_batch(model, encoded)):
        answers.append(generate(model, batch, make_cache(model, spec, batch), 8).token_ids)
    assert answers[0] == answers[1]
    assert len({tuple(row) for row in answers[0]}) > 1


@pytest.mark.parametrize("scheme", [None, "dense"])
def test_asking_later_changes_nothing_for_an_exact_cache(model, encoded, scheme):
    spec = duotone.scheme(scheme) if scheme else None
    batch = prepare(model, encoded)
    at_once = generate(model, batch, make_cache(model, spec, batch), 8)
    later = ask_later(batch)
    assert generate(model, later, make_cache(model, spec, later), 8).token_ids == at_once.token_ids


def test_asking_later_changes_the_first_token_of_a_lossy_cache(model):
    prompts = [TINY_TASK.example(i).messages() for i in range(12)]
    batch = prepare(model, encode(TinyProcessor(), prompts))
    spec = duotone.scheme("minmax", bits=1)
    exact = generate(model, batch, make_cache(model, None, batch), 1).token_ids
    assert generate(model, batch, make_cache(model, spec, batch), 1).token_ids == exact
    later = ask_later(batch)
    assert generate(model, later, make_cache(model, spec, later), 1).token_ids != exact


def test_asking_later_pads_pictures_and_questions_apart(model, encoded):
    batch, later = prepare(model, encoded), ask_later(prepare(model, encoded))
    assert later.pictures_end == 2 + 32
    assert later.visual_mask[:, : later.pictures_end].sum(1).tolist() == [16, 32, 16, 32]
    assert later.visual_mask[:, later.pictures_end - 1].all()
    assert not later.visual_mask[:, later.pictures_end :].any()
    assert later.attention_mask[:, -1].all()
    for row in range(4):
        before, after = (
            b.model_inputs["inputs_embeds"][row][b.attention_mask[row].bool()]
            for b in (batch, later)
        )
        torch.testing.assert_close(before, after)


def test_asking_later_lets_an_evicting_cache_read_the_pictures_itself(model, encoded):
    later = ask_later(prepare(model, encoded))
    dense = generate(model, later, make_cache(model, duotone.scheme("dense"), later), 6)
    all_kept = make_cache(model, duotone.scheme("vl-cache", keep=1.0), later)
    assert generate(model, later, all_kept, 6).token_ids == dense.token_ids
    half = make_cache(model, duotone.scheme("vl-cache", keep=0.5), later)
    generate(model, later, half, 1)
    pictures = int(later.attention_mask[:, : later.pictures_end].sum())
    questions = int(later.attention_mask[:, later.pictures_end :].sum())
    stored = sum(int(ledger.state.dense.lengths.sum()) for ledger in half.timeline.ledgers)
    assert abs(stored - 3 * (pictures / 2 + questions)) <= 4


def test_asking_later_needs_pictures(model):
    text = [[{"role": "user", "content": [{"type": "text", "text": "what is this ?"}]}]]
    with pytest.raises(ValueError, match="1 prompts without a picture"):
        ask_later(prepare(model, encode(TinyProcessor(), text)))


def test_answers_end_with_the_end_token(model, encoded):
    batch = prepare(model, encoded)
    usual = generate(model, batch, make_cache(model, None, batch), 8).token_ids
    ending = tiny_model()
    ending.generation_config.eos_token_id = [1, usual[0][2]]
    cut = generate(ending, batch, make_cache(ending, None, batch), 8).token_ids
    assert cut[0] == usual[0][: usual[0].index(usual[0][2]) + 1]


def test_decode_time_is_measured_between_tokens(model, encoded):
    batch = prepare(model, encoded)
    timed = generate(model, batch, make_cache(model, None, batch), 4, timed=True)
    assert 0 < timed.ms_per_token < 1000
    single = generate(model, batch, make_cache(model, None, batch), 1, timed=True)
    assert single.ms_per_token is None


def test_a_processor_of_another_model_is_noticed(model, encoded):
    fewer = dict(encoded, pixel_values=encoded["pixel_values"][:-1])
    with pytest.raises(ValueError, match="do model and processor belong together"):
        prepare(model, fewer)


def test_answers_are_decoded_without_special_tokens():
    assert decode_answers(TinyProcessor(), [[10, 11, 1], [0]]) == ["red blue", ""]
