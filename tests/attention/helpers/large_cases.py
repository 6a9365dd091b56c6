"""K and V whose channels have biases and swings of 1,000 and more, in growing and fixed stores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from begun import begin
from held_still import decode
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import duotone
from duotone.attention import decode_attention
from duotone.attention.plan import Shape, resolve
from duotone.attention.static import StaticDecoder
from duotone.cache import LayerStore, Ledger, StaticPlaces, StaticStore
from duotone.cache.pair import Layouts
from duotone.cache.segments import Segment
from duotone.quant import CacheSpec

from cases import device

KV_HEADS, GQA, HEAD_DIM = 2, 2, 64
# A prompt with a picture, and steps that make every stream flush twice.
PROMPT, PICTURE, STEPS = 240, slice(10, 100), 66
# So that scores differ by tens at most, as a model's do whose keys are biased.
SM_SCALE = 2e-3


def layer_spec(name: str, bits: float | None = None) -> CacheSpec:
    """A scheme in its first layer."""
    spec = duotone.scheme(name) if bits is None else duotone.scheme(name, bits=bits)
    return spec.at_layer(0)


def large_states(seed: int, swing: float = 1500.0, bias: float = 1000.0) -> Tensor:
    """K or V of all tokens: one channel is biased, one swings, a token of V and of K is large."""
    torch.manual_seed(seed)
    tokens = PROMPT + STEPS
    x = torch.randn(1, KV_HEADS, tokens, HEAD_DIM)
    x[..., 3] += bias
    x[:, :, ::2, 9] += swing
    x[:, :, 1::2, 9] -= swing
    x[:, :, ::29, 17:25] *= swing
    return x.to(device())


def layouts(spec: CacheSpec) -> Layouts:
    """As on a GPU, for those that have a kernel's order."""
    return resolve(spec, Shape(HEAD_DIM, KV_HEADS * GQA, KV_HEADS, torch.float16)).layouts


def filled(
    spec: CacheSpec, key: Tensor, value: Tensor, laid_out: bool = True
) -> tuple[LayerStore, Ledger]:
    """A store after the prompt, and its ledger."""
    store = LayerStore(spec, layouts(spec) if laid_out else Layouts())
    ledger = Ledger(spec, 1, device())
    visual = torch.zeros(1, PROMPT, dtype=torch.bool, device=device())
    visual[:, PICTURE] = True
    plan = ledger.plan(visual, torch.ones_like(visual))
    store.apply(plan, key[:, :, :PROMPT], value[:, :, :PROMPT])
    return store, ledger


def steps(
    spec: CacheSpec, key: Tensor, value: Tensor, impl: str, static: bool
) -> Iterator[tuple[Tensor, Tensor, list[Segment]]]:
    """(query, output, segments of a growing store) of every step."""
    store, ledger = filled(spec, key, value)
    decoder = None
    if static:
        fixed = StaticStore(store, *StaticPlaces.of(ledger.state, spec, STEPS))
        decoder = StaticDecoder([fixed], None, impl)
    one = torch.ones(1, 1, dtype=torch.bool, device=device())
    for t in range(STEPS):
        query = torch.randn(1, KV_HEADS * GQA, 1, HEAD_DIM, device=device()).to(key.dtype)
        new = [x[:, :, PROMPT + t : PROMPT + t + 1] for x in (key, value)]
        store.apply(ledger.plan(~one, one), *new)
        segments = store.segments(ledger.state)
        if decoder is not None:
            begin(decoder)
            yield query, decoder.attend(0, query, *new, SM_SCALE), segments
        else:
            out = decode_attention(query, segments, sm_scale=SM_SCALE, impl=impl)
            yield query, out, segments


def exact(query: Tensor, segments: list[Segment]) -> Tensor:
    """Attention in fp64 over what the segments hold."""
    keys, values, there = [], [], []
    for segment in segments:
        keys.append(segment.states("key").double())
        values.append(segment.states("value").double())
        places = torch.arange(keys[-1].shape[2], device=query.device)
        there.append(places < segment.lengths[:, None])
    grouped = query.double().unflatten(1, (KV_HEADS, GQA)).squeeze(3)
    scores = grouped @ torch.cat(keys, 2).mT * SM_SCALE
    weights = scores.masked_fill(~torch.cat(there, 1)[:, None, None], -torch.inf).softmax(-1)
    return (weights @ torch.cat(values, 2)).flatten(1, 2)[:, :, None]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def biased_model(
    dtype: torch.dtype, of: str = "k_proj", biases: tuple[float, ...] = (900.0, -700.0, 400.0)
) -> PreTrainedModel:
    """Keys, or values, of the first and of the last layer have biases as large as Qwen2.5's."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300, hidden_size=256, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval().to(device(), dtype)
    for layer in (model.model.layers[0], model.model.layers[-1]):
        bias = getattr(layer.self_attn, of).bias.data.view(KV_HEADS, HEAD_DIM)
        # A channel that RoPE turns fast, and some that it hardly turns.
        bias[:, [1, 28, 60]] = bias.new_tensor(biases)
    return model


def decoded(
    model: PreTrainedModel, spec: CacheSpec, impl: str, static: bool = False, steps: int = STEPS
) -> Tensor:
    """Logits of steps after a prompt, tokens given."""
    torch.manual_seed(1)
    ids = torch.randint(1, 300, (2, PROMPT + steps), device=model.device)
    cache = duotone.QuantizedCache(model, spec, impl=impl)
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)
    return decode(model, cache, ids[:, PROMPT:], room=steps if static else 0)
