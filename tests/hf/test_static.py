"""`StaticQuantizedCache` decodes exactly what `QuantizedCache` decodes, eager and compiled.

Both caches sum in orders of their own, and a number that lies on the border between two codes falls
to either side by its last digit. Models that are compared therefore compute in float64 throughout:
their caches differ by 1e-15, so that codes agree on every CPU, and a single code that does not
exceeds the tolerance by far.
"""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.generation import CompileConfig

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, Sharing, StaticQuantizedCache, TensorSpec

from exactly import FP64, rounding_as
from families import (
    FAMILIES,
    IMAGE,
    TEXT_ONLY,
    exact_model,
    inputs,
    logit_error,
    tiny_model,
    typed,
)

TWO = TensorSpec(2)
VISUAL = CacheSpec(visual=KVSpec(TWO, TWO), tau=(0, 1))
STREAM = CacheSpec(
    visual="text",
    text=KVSpec(TensorSpec(2, group=4), TensorSpec(2, along="channels", group=8)),
    sink=2,
    recent=3,
)
MIXED = STREAM.replace(visual=KVSpec(TWO, TensorSpec(2, along="channels")), ranges="run")
SPECS = {"visual": VISUAL, "stream": STREAM, "mixed": MIXED}
STATIC_FAMILIES = [name for name in FAMILIES if name != "gemma3"]
CASES = [(n, p) for n in STATIC_FAMILIES for p in SPECS if p != "visual" or n not in TEXT_ONLY]
NEW = 14


def batch_of(name: str) -> dict[str, Tensor]:
    if name in TEXT_ONLY:
        return inputs(name, [[23], [9], [16]])
    rows = [[3, "image", 9, "image", 4], [11, "image", 2], [7]]
    return inputs(name, rows[:1] * 2 if name == "smolvlm" else rows)


def run(model: PreTrainedModel, given: dict, cache: Cache, **kwargs: Any) -> tuple[Tensor, Tensor]:
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    settings |= {"past_key_values": cache, "output_logits": True, **kwargs}
    with rounding_as(model.dtype):
        out = model.generate(**typed(model, given), **settings)
    return out.sequences, torch.stack(out.logits)


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(ours[0], theirs[0])
    assert ours[1].dtype == theirs[1].dtype == torch.float64, "codes may flip"
    error = logit_error(ours[1], theirs[1])
    assert error < FP64, f"logits differ by {error:.2e} of their spread"


def both(
    name: str, spec: CacheSpec, given: dict[str, Tensor], **kwargs: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    model = exact_model(name)
    theirs = run(model, given, QuantizedCache(model, spec))
    ours = run(model, given, StaticQuantizedCache(model, spec, max_new_tokens=NEW), **kwargs)
    return ours, theirs


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_generates_as_the_growing_cache(name: str, policy: str) -> None:
    assert_same(*both(name, SPECS[policy], batch_of(name)))


WINDOWS = {
    "no window": STREAM.replace(sink=0, recent=0),
    "window shorter than a group": STREAM.replace(recent=2),
    "window of two groups": STREAM.replace(recent=8),
    "sinks that fill while decoding": STREAM.replace(sink=12, recent=1),
    "two group sizes": STREAM.replace(
        text=KVSpec(TensorSpec(2, group=2), TensorSpec(4, group=3)), recent=4
    ),
    "symmetric": STREAM.replace(
        text=KVSpec(
            TensorSpec(2, group=4, mapping="hybrid"),
            TensorSpec(2, along="channels", group=8, mapping="symmetric"),
        )
    ),
    "rotated, one scale per group": STREAM.replace(
        text=KVSpec(
            TensorSpec(4, group=4, transform="hadamard"), TensorSpec(4, along="span", group=2)
        )
    ),
    "shared codes": STREAM.replace(share=Sharing(key=1, value=0, layers=2, dominant=1)),
    "8-bit floats": STREAM.replace(dense_dtype="float8_e4m3fn"),
    "8-bit floats, normalised keys": STREAM.replace(
        dense_dtype="float8_e4m3fn", key_norm=True, sink=0, recent=1
    ),
    "normalised keys": STREAM.replace(key_norm=True, sink=0, recent=1),
}


@pytest.mark.parametrize("spec", WINDOWS.values(), ids=list(WINDOWS))
def test_windows(spec: CacheSpec) -> None:
    assert_same(*both("llama", spec, inputs("llama", [[13], [6], [9]])))


@pytest.mark.parametrize("name", ["vl-cache", "kivi-sink", "innerq", "xquant", "duotone"])
def test_schemes(name: str) -> None:
    spec = duotone.scheme(name)
    given = inputs("internvl", [[60, "image", 110], [90, "image", 70, "image", 10]])
    assert_same(*both("internvl", spec, given))


def test_freezes_a_prefilled_cache() -> None:
    model, given = exact_model("llama"), inputs("llama", [[23], [23]])
    growing, frozen = QuantizedCache(model, STREAM), QuantizedCache(model, STREAM)
    for cache in (growing, frozen):
        with torch.no_grad(), rounding_as(model.dtype):
            model(input_ids=given["input_ids"][:, :-1], past_key_values=cache)
    ours = run(model, given, frozen.freeze(max_new_tokens=NEW))
    assert_same(ours, run(model, given, growing))


def test_the_comparison_sees_one_code() -> None:
    """The last bit of the visual tokens' packed keys in one layer is far above the tolerance."""
    model, given = exact_model("internvl"), batch_of("internvl")
    runs = []
    for flips in (0, 1):
        cache = QuantizedCache(model, VISUAL)
        with torch.no_grad(), rounding_as(model.dtype):
            model(**typed(model, given), past_key_values=cache)
            cache.layers[0].store.visual.key.codes[0, 0, 0, 0] ^= flips
            step = {"input_ids": torch.full((3, 1), 7), "past_key_values": cache}
            runs.append((torch.zeros(1), model(**step).logits))
    assert_same(runs[0], runs[0])
    with pytest.raises(AssertionError, match="logits differ"):
        assert_same(runs[1], runs[0])


# The first one by default; llama and its stream are below, too.
COMPILED = [("internvl", "mixed"), ("llama", "stream"), ("qwen2", "stream"), ("llava", "visual")]


@pytest.mark.parametrize(("name", "policy"), COMPILED)
def test_compiles_to_one_graph(name: str, policy: str) -> None:
    torch._dynamo.reset()
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.utils.counters.clear()
    assert_same(*both(name, SPECS[policy], batch_of(name), compile_config=config))
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    # Its decode steps alone: the prompt runs eagerly, and no step compiles anew.
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    config = CompileConfig(fullgraph=True, mode="default")
    config._compile_all_devices = True
    assert_same(*both("llama", STREAM, batch_of("llama"), compile_config=config))


def test_one_compilation_serves_every_cache() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    model, given = exact_model("llama"), batch_of("llama")
    theirs = run(model, given, QuantizedCache(model, STREAM))
    held = []
    for keeps in (False, True, True):
        cache = StaticQuantizedCache(model, STREAM, max_new_tokens=NEW)
        assert_same(run(model, given, cache, compile_config=config), theirs)
        # Whether an old cache still lives, and holds the model's hooks, makes no difference.
        held += [cache] if keeps else []
        del cache
        gc.collect()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_number_in_a_cache_would_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda tensor, dim: None)
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    model, given = tiny_model("llama"), batch_of("llama")  # nothing is compared
    for _ in range(2):
        cache = StaticQuantizedCache(model, STREAM, max_new_tokens=NEW)
        run(model, given, cache, compile_config=config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_counts_every_byte() -> None:
    model, given = tiny_model("llama"), inputs("llama", [[23], [9]])
    cache = StaticQuantizedCache(model, STREAM, max_new_tokens=NEW)
    run(model, given, cache)
    stores = cache.decoder.stores
    held = {t.data_ptr(): t.nbytes for store in stores for t in store.changing}
    tables = 0
    assert cache.nbytes + tables == sum(held.values())


REPORTED = SPECS | {
    "shared": WINDOWS["shared codes"],
    "normalised": WINDOWS["normalised keys"],
    "8-bit floats": WINDOWS["8-bit floats"],
    "background": duotone.scheme("duotone"),
    "evicting": duotone.scheme("vl-cache"),
}


@pytest.mark.parametrize("policy", REPORTED)
def test_memory_is_what_the_growing_cache_says_but_for_spare_slots(policy: str) -> None:
    model, given = tiny_model("internvl"), batch_of("internvl")
    growing = QuantizedCache(model, REPORTED[policy])
    static = StaticQuantizedCache(model, REPORTED[policy], max_new_tokens=NEW)
    with pytest.raises(ValueError, match="empty"):
        static.memory()
    for cache in (growing, static):
        run(model, given, cache)
    ours, theirs = static.memory(), growing.memory()
    same = ("dense_equivalent_bytes", "visual_dense_equivalent_bytes", "nominal_bits")
    assert all(getattr(ours, name) == getattr(theirs, name) for name in same)
    parts = (ours.codes_bytes, ours.params_bytes, ours.dense_bytes)
    assert sum(parts) == static.nbytes == ours.total_bytes - ours.index_bytes
    assert ours.codes_bytes >= theirs.codes_bytes
    packed = [pair for s in static.decoder.stores for pair in (s.visual, s.background) if pair]
    data = sum(pair.codes_bytes + pair.params_bytes for pair in packed)
    assert data <= ours.visual_bytes
    assert bool(data) == bool(ours.visual_bytes)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("gemma3", MIXED, "sliding windows"),
        (
            "llama",
            STREAM.replace(share=Sharing(key=0, layers=2, weights=(0.5, 0.5))),
            "Sharing.weights",
        ),
    ],
    ids=["sliding", "averaged"],
)
def test_refuses_at_once(name: str, spec: CacheSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StaticQuantizedCache(tiny_model(name), spec, max_new_tokens=4)


def test_refuses_what_fixed_buffers_cannot() -> None:
    model, given = tiny_model("llama"), inputs("llama", [[9]])
    with pytest.raises(ValueError, match="max_new_tokens"):
        StaticQuantizedCache(model, STREAM, max_new_tokens=0)
    with pytest.raises(ValueError, match="empty cache"):
        QuantizedCache(model, STREAM).freeze(3)
    cache = StaticQuantizedCache(model, STREAM, max_new_tokens=NEW)
    with pytest.raises(ValueError, match="empty"):
        _ = cache.nbytes
    run(model, given, cache)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="one token"):
        model(input_ids=given["input_ids"][:, :3], past_key_values=cache)
    for call in (lambda: cache.crop(-1), lambda: cache.reorder_cache(torch.zeros(1).long())):
        with pytest.raises(NotImplementedError, match="QuantizedCache"):
            call()


FULL = r"room for, {} per sequence; got one more\. Give it a larger max_new_tokens"


@pytest.mark.parametrize("policy", SPECS)
@pytest.mark.parametrize("room", [1, 7])
def test_too_many_tokens_do_not_pass(policy: str, room: int) -> None:
    model, given = tiny_model("internvl"), batch_of("internvl")
    cache = StaticQuantizedCache(model, SPECS[policy], max_new_tokens=room)
    with pytest.raises(ValueError, match=FULL.format(room)):
        run(model, given, cache)
    assert int(cache.get_seq_length()) == given["input_ids"].shape[1] + room


def test_a_compiled_step_refuses_too_many_tokens() -> None:
    torch._dynamo.reset()
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    model, given = tiny_model("llama"), inputs("llama", [[9]])
    cache = StaticQuantizedCache(model, STREAM, max_new_tokens=5)
    with pytest.raises(ValueError, match=FULL.format(5)):
        run(model, given, cache, compile_config=config)


def next_logits(model: PreTrainedModel, cache: Cache, token: int) -> Tensor:
    with torch.no_grad(), rounding_as(model.dtype):
        return model(input_ids=torch.full((2, 1), token), past_key_values=cache).logits


@pytest.mark.parametrize("before", [0, 1, 9])
def test_a_deep_copy_goes_its_own_way(before: int) -> None:
    """Groups of 4 leave a window of 3: nine tokens behind the prompt some have left."""
    model, prompt = exact_model("llama"), inputs("llama", [[13], [13]])["input_ids"]

    def begun() -> StaticQuantizedCache:
        cache = StaticQuantizedCache(model, STREAM, max_new_tokens=NEW)
        with torch.no_grad(), rounding_as(model.dtype):
            model(input_ids=prompt, past_key_values=cache)
        for token in range(before):
            next_logits(model, cache, token)
        return cache

    cache = begun()
    clone, alone, other = copy.deepcopy(cache), begun(), begun()
    for token in range(5):
        for ours, theirs, next_one in ((clone, other, 7), (cache, alone, token)):
            logits = [next_logits(model, which, next_one) for which in (ours, theirs)]
            assert logit_error(*logits) < FP64
    assert clone.memory() == other.memory()


def test_a_copy_of_an_empty_cache_holds_the_model_too() -> None:
    model, given = exact_model("qwen2"), inputs("qwen2", [[9]])
    attention = model.config._attn_implementation
    cache = StaticQuantizedCache(model, STREAM, max_new_tokens=NEW)
    clone = copy.deepcopy(cache)
    ours = run(model, given, cache)
    del cache
    assert_same(run(model, given, clone), ours)
    del clone
    assert model.config._attn_implementation == attention


def test_releases_the_model() -> None:
    model = tiny_model("qwen2")
    before = model.config._attn_implementation
    cache = StaticQuantizedCache(model, STREAM, max_new_tokens=NEW)
    run(model, inputs("qwen2", [[9]]), cache)
    del cache
    assert model.config._attn_implementation == before


def test_the_image_token_is_visual() -> None:
    """The comparison would hold if no token were packed; here one must be."""
    model, given = tiny_model("internvl"), batch_of("internvl")
    cache = StaticQuantizedCache(model, VISUAL, max_new_tokens=NEW)
    run(model, given, cache)
    packed = cache.decoder.stores[0].places.visual
    assert packed.tolist() == (given["input_ids"] == IMAGE).sum(-1).tolist()
