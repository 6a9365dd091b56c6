"""Keys in the units that queries see: scores stay, codes gain, and nothing is done without need."""

import copy
from typing import Any

import pytest
import torch
from graph_answers import batch_of
from grown_keys import EIGHT, STREAM, grown
from held_still import decode
from test_generate import assert_same_run, run
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from benchmarks import stress
from duotone import CacheSpec, Eviction, KVSpec, QuantizedCache
from duotone.evaluate import evaluate
from duotone.hf.model.attentions import attentions
from duotone.loading import load
from duotone.quant.our_schemes import Part, Parts, same
from duotone.tasks import TASKS

from families import LOGIT_TOLERANCE, inputs, logit_error, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:K that has channels far larger")
VISUAL = CacheSpec(visual=KVSpec(EIGHT.replace(transform="hadamard"), EIGHT))
MIXED = STREAM.replace(visual=VISUAL.visual, ranges="run")
PARTS = MIXED.replace(background=VISUAL.visual)
SPECS = {
    "stream": STREAM,
    "mixed": MIXED,
    "parts": PARTS,
    "normed": STREAM.replace(key_norm=True, sink=0),
}
NAMES = ["internvl", "qwen2_vl", "gemma3", "glm4v", "llama"]


def as_they_are(spec: CacheSpec) -> CacheSpec:
    return spec.replace(scale_keys="never")


def are_scaled(cache: QuantizedCache) -> bool:
    return None not in cache.timeline.scales.each


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", NAMES)
def test_exact_codes_reproduce_16_bit(name: str) -> None:
    """Prompts, decode steps and padding, before and after RoPE of every kind."""
    model, given = grown(name), batch_of(name)
    assert are_scaled(QuantizedCache(model, MIXED))
    assert_same_run(run(model, given, MIXED), run(model, given))


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("policy", SPECS)
def test_exact_codes_of_every_store_reproduce_16_bit(policy: str) -> None:
    model, given = grown("internvl"), batch_of("internvl")
    assert_same_run(run(model, given, SPECS[policy]), run(model, given))


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=["rows", "crops"],
)
def test_rows_and_crops_keep_scaled_keys(mode: dict[str, Any]) -> None:
    model, given = grown("llama"), batch_of("llama")
    if "num_beams" not in mode:
        given = {name: x[:1] for name, x in given.items()}
        given = {name: x[:, given["attention_mask"][0].bool()] for name, x in given.items()}
    assert_same_run(run(model, given, STREAM, **mode), run(model, given, **mode))


@pytest.mark.usefixtures("exact_codec")
def test_chunks_after_a_past_read_scaled_keys() -> None:
    model, later = grown("llama"), torch.randint(2, 280, (1, 11))
    given = inputs("llama", [[40]])
    logits = []
    for cache in (DynamicCache(), QuantizedCache(model, STREAM)):
        with torch.no_grad():
            model(**given, past_key_values=cache)
            logits.append(model(input_ids=later, past_key_values=cache).logits)
    assert logit_error(*logits) < LOGIT_TOLERANCE


def test_a_prompt_is_the_same_to_the_last_bit() -> None:
    """Its attention reads keys as the model made them."""
    model, given = grown("internvl"), batch_of("internvl")
    with torch.no_grad():
        logits = [
            model(**given, past_key_values=QuantizedCache(model, spec)).logits
            for spec in (MIXED, as_they_are(MIXED))
        ]
    assert torch.equal(*logits)


@pytest.mark.usefixtures("exact_codec")
def test_the_same_tokens_are_evicted_and_the_others_read_alike() -> None:
    model, given = grown("internvl"), batch_of("internvl")
    evicting = MIXED.replace(evict=Eviction(0.5))
    assert_same_run(run(model, given, evicting), run(model, given, as_they_are(evicting)))


@pytest.mark.usefixtures("exact_codec")
def test_an_absorbed_prompt_is_scaled_as_one_that_ran() -> None:
    model, given = grown("llama"), inputs("llama", [[40]])
    dense, ran, absorbed = DynamicCache(), *(QuantizedCache(model, STREAM) for _ in range(2))
    with torch.no_grad():
        for cache in (dense, ran):
            model(**given, past_key_values=cache)
        absorbed.absorb(dense)
    for ours, theirs in zip(absorbed.timeline.stores, ran.timeline.stores, strict=True):
        assert torch.equal(ours.key, theirs.key)
        assert torch.equal(ours.stream.key.codes, theirs.stream.key.codes)


@pytest.mark.usefixtures("exact_codec")
def test_another_attention_function_gets_keys_as_the_model_made_them() -> None:
    model, given = grown("llama"), inputs("llama", [[40]])
    model.set_attn_implementation("eager")
    theirs, ours = DynamicCache(), QuantizedCache(model, STREAM)
    step = {"input_ids": torch.tensor([[7]])}
    logits = []
    for cache in (theirs, ours):
        with torch.no_grad():
            model(**given, past_key_values=cache)
            model.set_attn_implementation("eager")
            logits.append(model(**step, past_key_values=cache).logits)
    assert logit_error(*logits) < LOGIT_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_windows_in_16_bit_lose_a_rounding_at_most(dtype: torch.dtype) -> None:
    """Nothing leaves the window; each of q and k is rounded once more."""
    model = grown("llama").to(dtype)
    given, later = inputs("llama", [[40]] * 16), torch.randint(2, 280, (16, 1))
    exact = copy.deepcopy(model).double()
    spec = STREAM.replace(recent=64)
    caches = {
        "exact": (exact, DynamicCache()),
        "plain": (model, QuantizedCache(model, as_they_are(spec))),
        "scaled": (model, QuantizedCache(model, spec)),
    }
    assert are_scaled(caches["scaled"][1])
    logits = {}
    with torch.no_grad():
        for name, (each, cache) in caches.items():
            each(**given, past_key_values=cache)
            logits[name] = each(input_ids=later, past_key_values=cache).logits.double()
    # Over all logits: which of them is furthest off differs by CPU.
    errors = ((logits[name] - logits["exact"]).square().mean() for name in ("plain", "scaled"))
    plain, scaled = (float(error.sqrt()) for error in errors)
    assert 0 < scaled < 1.25 * plain


def test_large_keys_cost_duotone_tiny_nothing() -> None:
    """KL of answers about documents whose cache was quantized before the question."""
    loaded = load("duotone-tiny")
    stress.STRESSES["keys x8"](loaded.model.float())
    front = Part(((4, 3 / 8), (2, 1 / 4)), ((4, 1 / 8), (2, 3 / 4)))
    back = same(((2, 1 / 8), (1, 1 / 4)))  # most channels of K have no codes
    spec = Parts(front, back, gains=("fit", 1.0)).spec
    found = evaluate(
        loaded.model,
        loaded.processor,
        TASKS["documents"],
        {"scaled": spec, "as they are": as_they_are(spec)},
        samples=1,
        max_new_tokens=6,
        workers=0,
        later_question=True,
        kl=True,
    )
    scaled, plain = (found.scores[name]["kl"].value for name in ("scaled", "as they are"))
    assert 0 < scaled < 0.2 * plain


class Products(TorchDispatchMode):
    """Counts operations of torch, and the products and quotients among them."""

    operations = products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        self.products += func.name().partition(".")[0] in ("aten::mul", "aten::div")
        return func(*args, **kwargs or {})


def step_of(model: PreTrainedModel, spec: CacheSpec) -> Products:
    """Operations of one decode step."""
    cache = QuantizedCache(model, spec)
    with torch.no_grad():
        model(**inputs("llama", [[40]]), past_key_values=cache)
        with Products() as seen:
            model(input_ids=torch.tensor([[7]]), past_key_values=cache)
    return seen


def test_a_step_has_two_products_more_a_layer_or_not_an_operation() -> None:
    spec = STREAM.replace(recent=64)
    auto, never = (step_of(tiny_model("llama"), s) for s in (spec, as_they_are(spec)))
    assert auto.operations == never.operations
    model = grown("llama")
    auto, never = (step_of(model, s) for s in (spec, as_they_are(spec)))
    assert auto.products == never.products + 2 * 3


def test_nothing_is_done_where_queries_are_alike() -> None:
    """Keys and queries pass as the same objects: not a launch more, not a byte."""
    scales = QuantizedCache(tiny_model("llama"), STREAM).timeline.scales
    key, query = torch.ones(1, 2, 3, 16), torch.ones(1, 4, 3, 16)
    assert scales.each == [None] * 3
    assert scales.of_store(0, key) is key is scales.of_model(0, key)
    assert scales.of_queries(0, query) is query
    assert (scales.nbytes, scales.named(), scales.copied().each) == (0, {}, [None] * 3)


def test_scales_count_as_parameters() -> None:
    model, given = grown("llama"), inputs("llama", [[40]])
    plain, scaled = (QuantizedCache(model, spec) for spec in (as_they_are(STREAM), STREAM))
    for cache in (plain, scaled):
        with torch.no_grad():
            model(**given, past_key_values=cache)
    before, after = plain.memory(), scaled.memory()
    nbytes = 3 * 2 * 16 * 4
    assert after.params_bytes == before.params_bytes + nbytes
    assert after.total_bytes == before.total_bytes + nbytes
    assert after.dense_equivalent_bytes == before.dense_equivalent_bytes
    elements = before.total_bytes * 8 / before.bits_per_element
    assert after.bits_per_element == pytest.approx(8 * after.total_bytes / elements)
    growing = scaled.memory().params_bytes
    scaled.timeline.hold_still(4)
    # In fixed buffers a capture has its own.
    assert scaled.memory().params_bytes >= growing + nbytes


def test_fixed_buffers_decode_as_growing_ones() -> None:
    model, given, later = grown("llama"), inputs("llama", [[40]]), torch.randint(2, 280, (1, 20))
    caches = [QuantizedCache(model.double(), STREAM) for _ in range(2)]
    for cache in caches:
        with torch.no_grad():
            model(**given, past_key_values=cache)
    growing, still = (
        decode(model, c, later, room) for c, room in zip(caches, (0, 20), strict=True)
    )
    assert logit_error(still, growing) < 1e-9
    caches[1].timeline.thaw()
    step = later[:, :1]
    assert logit_error(*(decode(model, cache, step) for cache in caches)) < 1e-9


def test_gradients_pass_scales_that_inference_mode_made() -> None:
    model, given = grown("llama"), inputs("llama", [[40]])
    with torch.inference_mode():
        cache = QuantizedCache(model, STREAM)
    assert are_scaled(cache)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    model(input_ids=torch.tensor([[7, 8]]), past_key_values=cache).logits.sum().backward()
    # Scores of one token alone would need no queries.
    assert attentions(model, cache.facts)[0].q_proj.weight.grad.abs().max() > 0


@pytest.mark.usefixtures("exact_codec")
def test_autocast_scales_in_its_type() -> None:
    model, given = grown("llama"), inputs("llama", [[40]])
    logits = []
    for spec in (STREAM, as_they_are(STREAM)):
        cache = QuantizedCache(model, spec)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(**given, past_key_values=cache)
            logits.append(model(input_ids=torch.tensor([[7]]), past_key_values=cache).logits)
    assert logits[0].dtype == logits[1].dtype
    assert logit_error(*logits) < 0.1


def test_a_copy_and_a_reset_keep_their_scales() -> None:
    model, given = grown("llama"), inputs("llama", [[40]])
    cache, step = QuantizedCache(model, STREAM), torch.tensor([[7]])
    with torch.no_grad():
        model(**given, past_key_values=cache)
        expected = decode(model, copy.deepcopy(cache), step)
        cache.reset()
        model(**given, past_key_values=cache)
    assert torch.equal(decode(model, cache, step), expected)
