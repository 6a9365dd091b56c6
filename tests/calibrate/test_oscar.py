"""OSCAR's rotations: transcribed loops, and what they do to a range per token."""

import math

import pytest
import torch
from torch import Tensor

import duotone
from duotone import QuantizedCache
from duotone.calibrate.oscar import States, StatesRecorder, reversed_bits, rotation, rotations
from duotone.hf.recording import recording
from duotone.quant.rotation import hadamard

from families import inputs, tiny_model

TOKENS, KV_HEADS, GROUP, D = 50, 2, 3, 8


@pytest.fixture
def states() -> States:
    torch.manual_seed(0)
    mix = torch.randn(3, D, D)
    heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    return States(*([torch.randn(TOKENS, n, D) @ m] for n, m in zip(heads, mix, strict=True)))


def moments(states: States) -> dict[str, Tensor]:
    """Means over kv heads, token by token."""
    query, key, value = (states.rows(which) for which in ("query", "key", "value"))
    of_keys, of_values = torch.zeros(2, D, D, dtype=torch.float64)
    for h in range(KV_HEADS):
        seen = torch.zeros(D, D, dtype=torch.float64)
        for t in range(TOKENS):
            for g in range(GROUP):
                q = query[t, h * GROUP + g]
                seen += torch.outer(q, q) / (TOKENS * GROUP)
        of_keys += seen / KV_HEADS
        weights = [float(key[t, h] @ seen @ key[t, h]) for t in range(TOKENS)]
        for t in range(TOKENS):
            v, share = value[t, h], weights[t] / sum(weights)
            of_values += share * torch.outer(v, v) / KV_HEADS
    return {"key": of_keys, "value": of_values}


def test_rotations_are_eigenvectors_times_hadamard(states: States) -> None:
    bases = rotations([states], {})
    for which, moment in moments(states).items():
        found = getattr(bases, which)[0].double()
        assert torch.equal(found[0], found[1])
        assert torch.allclose(found[0].T @ found[0], torch.eye(D).double(), atol=1e-6)
        # Undone P and H leave eigenvectors, smallest first.
        values, _ = torch.linalg.eigh(moment)
        order = [0, 4, 2, 6, 1, 5, 3, 7]
        place = torch.empty(D, dtype=torch.long)
        for i, at in enumerate(order):
            place[at] = D - 1 - i
        vectors = found[0][:, place.argsort()] @ hadamard(D)
        spectrum = (vectors.T @ moment @ vectors).diagonal()
        torch.testing.assert_close(spectrum, values, atol=1e-4 * float(values[-1]), rtol=1e-3)


def test_bits_are_reversed() -> None:
    assert reversed_bits(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert reversed_bits(1).tolist() == [0]


def test_other_numbers_of_channels_have_blocks() -> None:
    turned = rotation(torch.diag(torch.arange(1.0, 13.0).double()))
    assert torch.allclose(turned, hadamard(12), atol=1e-12)


def test_rotations_even_out_what_queries_weigh() -> None:
    """In one large direction of the queries all channels get the same share."""
    moment = torch.eye(16).double()
    moment[3, 3] = 1000.0
    turned = rotation(moment)
    assert (turned.T @ moment @ turned).diagonal().std() < 1e-9
    assert math.isclose(float(turned[3].abs().max()), 0.25, rel_tol=1e-9)


def test_a_model_runs_in_its_own_rotations(tmp_path) -> None:
    model = tiny_model("internvl")
    recorder = StatesRecorder.of(model, by="test")
    with pytest.raises(ValueError, match="need states"):
        recorder.bases()
    given = inputs("internvl", [["image", 7, 8, 9], ["image", 9, 8, 7]])
    with recording(model, recorder.record), torch.no_grad():
        model(**given)
    file = tmp_path / "rotations.safetensors"
    recorder.bases().save(file)
    spec = duotone.scheme("oscar-rotation", bits=8, file=str(file)).replace(sink=1, recent=2)
    with torch.no_grad():
        plain = model(**given, past_key_values=(cache := QuantizedCache(model, spec))).logits
    assert cache.memory().codes_bytes > 0
    assert torch.isfinite(plain).all()
