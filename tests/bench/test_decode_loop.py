"""The lean decoder and its loop: caches of all kinds, 16-bit and integer weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import duotone
from duotone.bench.caches import DenseCache, PackedCache
from duotone.bench.decode_loop import DecodeLoop
from duotone.bench.language import LanguageModel
from duotone.bench.linears import elementwise
from duotone.planning.capacity import allocated_bytes
from duotone.planning.shapes import Load

from tiny_decoder import CPU, LOAD, SPECS, TINY


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(TINY, CPU, LOAD.tokens)


@pytest.mark.parametrize("spec", [None, *SPECS.values()], ids=["16-bit", *SPECS])
def test_planned_bytes_are_allocated_bytes(spec: duotone.CacheSpec | None) -> None:
    for load in (LOAD, Load(70, 20, 1), Load(40, 3, 9), Load(33, 60, 200)):
        given = (load, 2, CPU, torch.float32)
        cache = DenseCache(TINY, *given) if spec is None else PackedCache(TINY, spec, *given)
        assert cache.nbytes == 2 * allocated_bytes(TINY, spec, load)


@torch.inference_mode()
@pytest.mark.parametrize("weights", ["w8a8", "w4a8"])
def test_integer_weights_say_what_their_dequantized_ones_say(weights: str) -> None:
    """The same model in floating point: its codes times scales, its static quantizers kept."""
    torch.manual_seed(1)
    model = LanguageModel(TINY, CPU, LOAD.tokens, weights=weights)
    prompt = torch.randint(TINY.vocab, (LOAD.visual,))
    logits = []
    model._most_likely = lambda normed: logits.append(F.linear(normed, model.head)) or torch.ones(1)
    model.prefill(prompt, Growing().take)
    model.linears.product = lambda codes, matrix: (
        codes.float() * model.linears.scale @ matrix.dequantized().T
    )
    model.prefill(prompt, Growing().take)
    assert logits[0].std() > 0.3
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3)


def test_rotated_queries_and_keys_are_apart() -> None:
    x = torch.randn(3, 7, 10)[:, :5]
    angles = torch.rand(3, 1, 5)
    query, key = elementwise(False).rotate(x, angles.cos(), angles.sin(), 4)
    assert query.is_contiguous()
    assert key.is_contiguous()
    turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.exp(1j * angles)
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(torch.cat([query, key], 1), expected)


class Growing:
    """The same attention by concatenation and softmax: what a cache of 16 bit must equal."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.states[layer] = (key.clone(), value.clone())

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
    ) -> Tensor:
        new = zip(self.states[layer], (key, value), strict=True)
        self.states[layer] = tuple(torch.cat(pair, 2) for pair in new)
        key, value = (t.repeat_interleave(2, 1) for t in self.states[layer])
        return (query @ key.transpose(-1, -2) * sm_scale).softmax(-1) @ value


@torch.inference_mode()
def test_steps_continue_the_prefill(model: LanguageModel) -> None:
    prompt = torch.randint(TINY.vocab, (LOAD.visual + LOAD.prompt,))
    reference = Growing()
    first = model.prefill(prompt, reference.take)
    cache = DenseCache(TINY, LOAD, 1, CPU, torch.float32)
    assert torch.equal(first, model.prefill(prompt, cache.take_prompt))
    ours = theirs = first
    for step in range(6):
        cache.jump(step)
        position = torch.tensor([len(prompt) + step])
        ours, theirs = model.step(ours, position, cache), model.step(theirs, position, reference)
        assert torch.equal(ours, theirs)
    longer = torch.cat([prompt, first])
    again = Growing()
    assert torch.equal(model.prefill(longer, again.take), _second(model, prompt, first))


def _second(model: LanguageModel, prompt: Tensor, first: Tensor) -> Tensor:
    reference = Growing()
    model.prefill(prompt, reference.take)
    return model.step(first, torch.tensor([len(prompt)]), reference)


@torch.inference_mode()
@pytest.mark.parametrize("name", SPECS)
def test_loop_follows_the_schedule(name: str, model: LanguageModel) -> None:
    cache = PackedCache(TINY, SPECS[name], LOAD, 2, CPU, torch.float32)
    query = torch.randn(2, TINY.q_heads, 1, TINY.head_dim)
    state = torch.randn(2, 2, TINY.kv_heads, 1, TINY.head_dim)
    assert cache.attend(0, query, *state, 0.1).isfinite().all()
    loop = DecodeLoop(model, cache, 2, LOAD.visual + LOAD.prompt)
    loop.capture(0)
    loop.run(0, 70)
    walked = [t.clone() for t in (cache.places.dense, cache.places.stream)]
    assert loop.positions.tolist() == [LOAD.visual + LOAD.prompt + 70] * 2
    cache.jump(70)
    for here, there in zip(walked, (cache.places.dense, cache.places.stream), strict=True):
        assert torch.equal(here, there)
