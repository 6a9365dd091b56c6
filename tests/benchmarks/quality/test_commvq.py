"""CommVQ: its centres, its codes, and a cache of decoded visual tokens."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from benchmarks.quality import commvq
from benchmarks.quality.commvq import CommVQ, KeyCodebook, ValueCodec
from benchmarks.quality.simulated import changing
from benchmarks.quality.zoo import Conversation, measure
from training.zoo.train import HELD_OUT, Feed
from zoo_members import short


def test_channels_of_a_rotary_pair_are_neighbours() -> None:
    keys = torch.arange(8.0).view(1, 2, 4)
    assert commvq.paired(keys).tolist() == [[0, 2, 1, 3, 4, 6, 5, 7]]
    assert torch.equal(commvq.unpaired(commvq.paired(keys), keys.shape), keys)


def test_centres_are_the_nearest_of_their_form_to_weighted_means() -> None:
    torch.manual_seed(0)
    rows, soft = torch.randn(40, 6), torch.rand(40, 16)
    found = commvq.fitted(rows, soft, commvq.design_of(2))
    weights = soft.sum(0)
    means = (soft.T @ rows) / weights[:, None]
    # Of all numbers X, Y of A and B: gradient descent on the same error.
    parts = torch.zeros(2, 4, 3, requires_grad=True)

    def centres() -> torch.Tensor:
        x, y = parts
        both = torch.stack([x[:, None] - y[None], x[None] + y[:, None]], -1)
        return both.flatten(0, 1).flatten(1)

    learner = torch.optim.LBFGS([parts], max_iter=200, line_search_fn="strong_wolfe")

    def error() -> torch.Tensor:
        learner.zero_grad()
        loss = (weights[:, None] * (centres() - means).square()).sum()
        loss.backward()
        return loss

    learner.step(error)
    torch.testing.assert_close(found, centres().detach(), atol=1e-3, rtol=1e-3)


def test_centres_commute_with_rotations() -> None:
    """The rotated centres of (X, Y) are the centres of rotated (X, Y): rotary positions commute."""
    design, angle = commvq.design_of(1), torch.tensor(0.7)
    x, y = torch.randn(2), torch.randn(2)
    cos, sin = angle.cos(), angle.sin()
    turned = (cos * x - sin * y, sin * x + cos * y)

    def centres(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (design @ torch.stack([x, y], 1).flatten()).view(-1, 2)

    matrix = torch.tensor([[cos, -sin], [sin, cos]])
    # (X_A - Y_B, X_B + Y_A) is a pair of complex products of A and of i B.
    assert torch.allclose(centres(*turned), centres(x, y) @ matrix.T, atol=1e-6)


def test_steps_of_keys_fall_and_count_their_bits() -> None:
    torch.manual_seed(0)
    keys = torch.randn(300, 2, 64) * torch.linspace(0.2, 2, 64)
    errors = []
    for bits in (0.1, 0.2, 0.4):
        book = KeyCodebook.fit(keys, bits, half_bits=3)
        errors.append(float((book.decode(keys) - keys).square().mean()))
        assert book.token_bits == int(bits * 128 / 6) * 6 + 16
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < float(keys.square().mean())


def test_fewer_bits_are_the_first_steps() -> None:
    torch.manual_seed(0)
    keys = torch.randn(300, 2, 64) * torch.linspace(0.2, 2, 64)
    long, short = (KeyCodebook.fit(keys, bits, half_bits=3) for bits in (0.4, 0.2))
    assert len(short.centres) < len(long.centres)
    assert torch.equal(long.at(0.2).centres, short.centres)


def test_narrow_keys_are_one_group() -> None:
    torch.manual_seed(0)
    keys = torch.randn(300, 1, 64) * torch.linspace(0.2, 2, 64)
    book = KeyCodebook.fit(keys, 0.4, half_bits=3)
    assert book.token_bits == int(0.4 * 64 / 6) * 6 + 16
    assert book.decode(keys).shape == keys.shape


def test_codes_of_values_are_two_digits_of_four_choices(monkeypatch) -> None:
    monkeypatch.setattr(commvq, "TOKENS_OF_STEP", 128)
    hot = torch.eye(4)[None]
    assert ValueCodec.binary(hot).tolist() == [[1, 0, 0, 1, 1, 1, 0, 0]]
    values = torch.randn(200, 16) @ torch.randn(16, 16)
    torch.manual_seed(0)
    fresh = ValueCodec(16, 1, values.abs().mean(0)).eval()
    assert fresh.token_bits == 16 + 16
    learned = commvq.trained(values, 1, steps=600)
    with torch.no_grad():
        before, after = ((c(values) - values).square().mean() for c in (fresh, learned))
        assert after < 0.8 * before, (after, before)
        norms = (learned(values) / learned.scale).norm(dim=-1)
    torch.testing.assert_close(norms, (values / learned.scale).norm(dim=-1), rtol=2e-3, atol=0)


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_a_cache_holds_decoded_tokens_of_exact_layers(name: str, monkeypatch) -> None:
    monkeypatch.setattr(commvq, "STEPS", 3)
    monkeypatch.setattr(commvq, "TOKENS_OF_STEP", 64)
    torch.manual_seed(0)
    member = short(name)
    model = member.build().eval()
    talk = Conversation(model, Feed("cpu", HELD_OUT, 1).next(replace(member.shapes[0], rows=1)))
    seen = talk.visual[:, : talk.first["input_ids"].shape[1]]
    book = CommVQ.fit(model, [(talk.first, seen)], [1], steps=2, half_bits=2)[1]
    plain = DynamicCache(config=model.config.get_text_config())
    with torch.no_grad():
        model(**talk.first, past_key_values=plain)
    found = book.cache(model, talk.first, seen)
    changed = []
    for layer, (ours, theirs) in enumerate(zip(found.layers, plain.layers, strict=True)):
        apart = (ours.keys - theirs.keys).abs().amax((1, 3)) > 1e-5
        if layer in book.layers:
            assert torch.equal(apart, seen)
            changed.append(layer)
        else:
            assert not apart.any()
    assert changed == sorted(book.layers)
    _, row = measure([talk], {"commvq": book})
    assert row["visual_bits"] == book.bits
    assert row["kl"] > 0
    with changing(model, lambda layer, which, x: x), torch.no_grad():
        same = DynamicCache(config=model.config.get_text_config())
        model(**talk.first, past_key_values=same)
    assert torch.equal(same.layers[0].keys, plain.layers[0].keys)
