"""Conversations token by token: what they are made of, their steps, bytes and losses."""

import pytest
import torch
from transformers import DynamicCache

import duotone
from benchmarks.quality import conversation
from benchmarks.quality.talks import Talk, talk
from duotone import QuantizedCache
from training.zoo.batches import Batch
from training.zoo.members import MEMBERS
from training.zoo.train import HELD_OUT, Feed
from training.zoo.vocabulary import BOS, ID, IMAGE, PAD
from zoo_members import short


def _batch(name: str, length: int, rows: int, parts: int) -> Batch:
    batch = talk(short(name, length=length), Feed("cpu", HELD_OUT, 1), rows, parts)
    batch.pixels = batch.pixels.double()
    return batch


def test_parts_are_joined_without_padding() -> None:
    batch = _batch("llava", 130, rows=5, parts=2)
    assert batch.ids.shape == batch.kinds.shape == (5, 260)
    assert not (batch.ids == PAD).any()
    assert ((batch.ids == BOS).nonzero()[:, 1] == 0).all()
    assert (batch.ids[:, [1, 130]] == ID["<vision>"]).all()
    assert torch.equal(batch.ids == IMAGE, (batch.ids == IMAGE)[:1].expand(5, -1))
    assert batch.pixels.shape[1] == 2
    told = Talk(short("llava", length=130).build().eval(), batch)
    assert 0 < told.about_text.sum() < len(told.about_text) == int((batch.kinds > 0).sum())
    assert told.sums(torch.ones(len(told.row)))["kl"].tolist() == (batch.kinds > 0).sum(1).tolist()


@pytest.mark.parametrize("name", ["gemma3", "qwen3-vl"])
def test_steps_are_those_of_one_pass(name: str) -> None:
    """Pictures one by one, also later ones: Gemma 3 sees each of them whole, Qwen counts in 3-D."""
    side, pictures = MEMBERS[name].side, MEMBERS[name].shapes[0].pictures
    length = pictures * side**2 + 15
    batch = _batch(name, length, rows=1, parts=2)
    batch.kinds[:, 1:] = 1  # all tokens count
    model = short(name, length=length).build().double().eval()
    told = Talk(model, batch)
    covered = [x for step in told.steps() for x in step.inputs["input_ids"][0].tolist()]
    assert covered == batch.ids[0].tolist()
    found = told.read(DynamicCache(config=model.config.get_text_config()))
    with torch.no_grad():
        whole = model(**told.given).logits[0, :-1].log_softmax(-1)
    last = [step.last for step in told.steps()][:-1]
    assert len(found) == len(last) < whole.shape[0]
    assert (found - whole[last]).abs().max() < 1e-8


def test_rows_lose_by_their_codes_and_hold_their_bytes() -> None:
    model = short("llava", length=150).build().double().eval()
    told = Talk(model, _batch("llava", 150, rows=2, parts=1))
    rows = {"exact": duotone.scheme("dense"), **conversation.default()}
    few = f"duotone-mixed@2, {conversation.ONE_BIT}"
    rows = {name: rows[name] for name in ("exact", conversation.KIVI, few)}
    rows["too deep"] = rows[few].replace(layers=(duotone.LayerRule(90, text=None),))
    plain, exact, kivi, mixed, refused = conversation.measure([told], rows)
    assert exact["kl"] < 1e-9 < min(kivi["kl"], mixed["kl"])
    assert plain["accuracy"] == exact["accuracy"]
    assert mixed["spec"] == rows[few].to_dict()
    assert plain["tokens"] == [
        sum(both) for both in zip(plain["tokens_pictures"], plain["tokens_text"], strict=True)
    ]
    parts = zip(mixed["kl_sums"], mixed["kl_pictures_sums"], mixed["kl_text_sums"], strict=True)
    assert all(whole == pytest.approx(a + b, rel=1e-2) for whole, a, b in parts)
    whole = 3 * 2 * 256 * 150 * 2  # layers, K and V, channels, tokens, bytes
    assert exact["bytes"] == pytest.approx(whole, rel=0.1)  # with its index and spare slots
    assert mixed["bytes"] < kivi["bytes"] < exact["bytes"]
    assert exact["bytes_mean"] < exact["bytes"]
    assert refused["failed"].startswith("ValueError")


def test_windows_of_the_model_do_not_count() -> None:
    """One of Gemma 3's three layers has all tokens; windows of the others are transformers'."""
    model = short("gemma3", length=150).build().double().eval()
    told = Talk(model, _batch("gemma3", 150, rows=1, parts=1))
    cache = QuantizedCache(model, duotone.scheme("dense"))
    told.read(cache)
    assert cache.memory().state_bytes > 0
    assert conversation.bytes_in_16_bit(cache) == pytest.approx(2 * 256 * 150 * 2, rel=0.1)


def test_sets_share_no_rows() -> None:
    sets = [rows() for rows in conversation.SETS.values()]
    assert len({name for rows in sets for name in rows}) == sum(map(len, sets))
    default = conversation.default()
    parts = ("", f", {conversation.ONE_BIT}", ", whole pictures")
    mixed, one_bit, whole = (default[conversation.OURS + part] for part in parts)
    assert conversation.with_pictures(whole, mixed) == mixed == duotone.scheme("duotone-mixed")
    assert conversation.with_pictures(mixed, duotone.scheme("duotone", bits=1)) == one_bit
    assert (whole.visual, whole.background) == (duotone.scheme("duotone-whole").visual, None)


def test_windows_of_kivi_are_as_published() -> None:
    """K has 44 recent ones of 300 tokens, V has 128; all others take 3 bits with ranges."""
    assert conversation.published_bytes(2, 300, 1) == ((44 + 128) * 16 + (256 + 172) * 3) / 8
    assert conversation.published_bytes(4, 128, 64) == 64 * (128 * 16 + 128 * 5) / 8
