"""Streams whose codes another layer keeps, on a real GPU: against the reference, whole records."""

from dataclasses import replace

import pytest
import torch
from begun import begin
from cuda_device import NEEDS_KERNELS
from run_cases import KEEPS, reader
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import duotone
from duotone import CacheSpec, QuantizedCache, Sharing
from duotone.attention import decode_attention
from duotone.attention.cuda.groups.records import GroupLayout
from duotone.attention.static import StaticDecoder
from duotone.cache.pair import PackedPair
from duotone.quant import KVSpec, TensorSpec

from cases import Case, assert_near, assert_near_half, build, poisoned, reference
from frozen_decoder import Heads, Tokens, frozen_decoder

pytestmark = NEEDS_KERNELS
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ODD = (3329, 100, 63, 1)


def kivi(key_bits: int, value_bits: int, group: int = 32) -> dict[str, TensorSpec]:
    return {
        "key": TensorSpec(key_bits, "tokens", group),
        "value": TensorSpec(value_bits, "channels", group),
    }


INNER = {"key": TensorSpec(2, "channels", 32), "value": TensorSpec(2, "tokens", 32)}
CASES = [
    *(Case(ODD, **kivi(k, v), kv_heads=2, head_dim=128, dtype=BF16)
      for k, v in ((1, 1), (2, 1), (4, 2))),
    *(Case(ODD, **kivi(2, 1), gqa=gqa, head_dim=128, dtype=FP16) for gqa in (1, 6, 7, 16)),
    *(Case(ODD, **kivi(2, 2), head_dim=d, dtype=FP16) for d in (32, 64, 96, 256)),
    Case(ODD, **INNER, kv_heads=2, head_dim=128, dtype=BF16),
    Case(ODD, **kivi(1, 1, 64), head_dim=64, dtype=FP32),
    Case((20_000,), **kivi(2, 1), head_dim=128, dtype=BF16),
    # More units than places.
    Case((100, 1, 32, 300, 33) * 20, **kivi(2, 1), gqa=4, kv_heads=8, head_dim=128, dtype=BF16),
]  # fmt: skip


def decode(query: Tensor, segment, sm_scale: float) -> Tensor:
    return decode_attention(query, [segment], sm_scale=sm_scale, impl="cuda")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("parts", KEEPS.values(), ids=KEEPS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference_and_whole_records(case: Case, parts: tuple[str, ...]) -> None:
    query, kv = build(case)
    (segment,) = poisoned(kv)
    out = decode(query, reader(segment, parts), case.sm_scale)
    expected = reference(case, query, kv)
    assert_near_half(out, expected)
    pair = PackedPair(segment.key, segment.value).laid_out(GroupLayout())
    whole = replace(segment, key=pair.key, value=pair.value, records=pair.records)
    # The same image of a record, cut the same way; which warp draws it, and so its rounding of
    # weights to fp16, is not fixed.
    again = decode(query, whole, case.sm_scale)
    assert_near_half(out, again)


@pytest.mark.parametrize("parts", KEEPS.values(), ids=KEEPS)
def test_wrong_codes_of_another_layer_are_noticed(parts: tuple[str, ...]) -> None:
    case = Case((300,), **kivi(2, 2), head_dim=128, dtype=BF16)
    query, kv = build(case)
    read = reader(kv[0], parts)
    for codes in read.records.codes:
        if codes is not None:
            codes[:, :, 2] ^= 0x55
    with pytest.raises(AssertionError, match="rms"):
        assert_near(decode(query, read, case.sm_scale), reference(case, query, kv))


def test_a_short_stream_before_a_window() -> None:
    case = Case((33, 1), **kivi(2, 1), dense=(160, 7), head_dim=128, dtype=BF16)
    query, (segment, window) = build(case)
    kv = [reader(segment, KEEPS["both"]), window]
    out = decode_attention(query, kv, sm_scale=case.sm_scale, impl="cuda")
    assert_near(out, reference(case, query, [segment, window]))


KIVI = duotone.scheme("kivi", bits=2).replace(recent=32)
WIDE = KIVI.replace(text=KVSpec(TensorSpec(4, "tokens", 32), TensorSpec(4, "channels", 32)))
# Quantized by the packing kernel, and by torch, which knows eta.
SPECS = {
    "pairs": KIVI.replace(share=Sharing(key=0, value=0)),
    "chain": KIVI.replace(share=Sharing(key=0, value=1, dominant=1)),
    "three": WIDE.replace(share=Sharing(value=0, layers=3, dominant=2)),
    "xquant": duotone.scheme("xquant", kq=3, vq=1, km=1, vm=1).replace(recent=32),
}
SHAPE = Heads(3, 4, 2, 64)
STEPS = 80


def frozen(spec: CacheSpec, impl: str) -> StaticDecoder:
    torch.manual_seed(0)
    return frozen_decoder(SHAPE, spec, Tokens(90, 41, STEPS), 3, "cuda", BF16, impl)


def step(
    at: StaticDecoder, query: Tensor, states: Tensor, always_flush: bool = False
) -> list[Tensor]:
    """Every layer's output. query: [layers, batch, ..]; states: [layers, K and V, batch, ..].

    always_flush: the device finds at every step whose groups are due.
    """
    if always_flush:
        at.flush()
        at.advance()
    else:
        begin(at)
    return [at.attend(i, query[i], *states[i], 0.125) for i in range(SHAPE.layers)]


@pytest.mark.parametrize("name", SPECS)
def test_a_captured_step_flushes_and_attends_as_the_reference(name: str) -> None:
    ours, theirs = (frozen(SPECS[name], impl) for impl in ("cuda", "reference"))
    assert all(store.stream.records is not None for store in ours.stores)
    assert all(store.stream.records is None for store in theirs.stores)
    size = (SHAPE.layers, 3, SHAPE.q_heads, 1, SHAPE.head_dim)
    query = torch.empty(size, device="cuda", dtype=BF16)
    states = torch.empty(SHAPE.layers, 2, 3, 2, 1, SHAPE.head_dim, device="cuda", dtype=BF16)
    graph, found, streamed = torch.cuda.CUDAGraph(), [], ours.places[0].stream.clone()
    for number in range(STEPS):
        query.normal_(), states.normal_()
        expected = step(theirs, query, states)
        if number == 0:
            found = step(ours, query, states, always_flush=True)  # kernels compile
        if number == 1:
            with torch.cuda.graph(graph):
                found = step(ours, query, states, always_flush=True)
        if number >= 1:
            graph.replay()
        assert_near(torch.stack(found), torch.stack(expected))
    assert bool((ours.places[0].stream >= streamed + 64).all())


@torch.inference_mode()
@pytest.mark.parametrize("name", SPECS)
def test_a_model_says_what_it_says_by_the_reference(name: str) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval().to("cuda", BF16)
    tokens = torch.randint(300, (2, 230), device="cuda")
    logits = {}
    for impl in ("reference", "cuda"):
        cache = QuantizedCache(model, SPECS[name], impl=impl)
        given = [tokens[:, :150], *tokens[:, 150:].split(1, 1)]
        seen = [model(x, past_key_values=cache).logits[:, -1].float() for x in given]
        logits[impl] = torch.stack(seen)
        records = [layer.store.stream.records is not None for layer in cache.layers]
        assert records == [impl == "cuda"] * 3
        cache.detach()
    error = (logits["cuda"] - logits["reference"]).norm() / logits["reference"].norm()
    assert error < 2e-2
