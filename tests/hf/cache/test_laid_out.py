"""Caches in a kernel's order, decoded by the reference, say what others say."""

import pytest
import torch
from held_still import decode
from test_memory import check
from transformers import LlamaConfig, LlamaForCausalLM

import duotone
from duotone import KVSpec, LayerRule, QuantizedCache, Sharing, TensorSpec
from duotone.attention.cuda.groups import records as group_records
from duotone.attention.cuda.shared import runtime
from duotone.hf.model import implementation
from pretended_gpu import single_precision

WINDOW = {"sink": 0, "recent": 32}
WIDE = KVSpec(duotone.scheme("kivi", bits=2).text.key, TensorSpec(2, "channels", 128))
SPECS = {
    "kivi": duotone.scheme("kivi", bits=2).replace(**WINDOW),
    "innerq": duotone.scheme("innerq", bits=2).replace(**WINDOW),
    "xquant": duotone.scheme("xquant", kq=1, vq=1, km=1, vm=1).replace(**WINDOW),
    # A chain: K of layers 0 and 1, V of 1 and 2, whose codes the second of each keeps.
    "chain": duotone.scheme("xquant", kq=2, vq=3, dominant=1).replace(
        share=Sharing(key=0, value=1, dominant=1), **WINDOW
    ),
    "values": duotone.scheme("kivi", bits=1).replace(
        share=Sharing(value=0, layers=3, dominant=2), **WINDOW
    ),
    # Layer 1, whose V has no records of 64 channels, shares K with a layer that has.
    "one without": duotone.scheme("kivi", bits=2).replace(
        share=Sharing(key=0, dominant=1), layers=(LayerRule(1, 2, text=WIDE),), **WINDOW
    ),
    "average": duotone.scheme("xquant", vm=1, gamma=0.4).replace(**WINDOW),
}
SHARED = ("xquant", "chain", "values")
# What takes long and differs least from the others.
LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("innerq", "values", "average")]
LENGTHS = (150, 93, 20)
# Tokens while which a group of 32 leaves the windows of the longer two.
FLUSHED = 16


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, pad_token_id=0)).eval().double()


def prompt() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    width = max(LENGTHS)
    mask = torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]
    tokens = torch.randint(1, 300, (len(LENGTHS), width)).masked_fill(~mask, 0)
    return {"input_ids": tokens, "attention_mask": mask.long()}


def caches(model, name: str, monkeypatch):
    """(laid out, plain)."""
    plain = QuantizedCache(model, SPECS[name], impl="reference")
    with monkeypatch.context() as patched:
        patched.setattr(runtime, "missing", lambda device: None)
        patched.setattr(runtime, "is_untried", lambda device: False)
        patched.setattr(runtime, "has_kernels", lambda device: False)
        patched.setattr(implementation, "Shape", single_precision)
        return QuantizedCache(model, SPECS[name]), plain


def streams(cache) -> list[bool]:
    return [layer.store.stream.records is not None for layer in cache.layers]


def generate(model, cache, tokens: int, **more) -> torch.Tensor:
    settings = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None} | more
    return model.generate(past_key_values=cache, **settings)


@pytest.mark.parametrize("name", ["kivi", "xquant", "chain", *LONG])
def test_generation_and_later_turns_are_the_same(name: str, model, monkeypatch) -> None:
    laid, plain = caches(model, name, monkeypatch)
    given = prompt()
    for tokens in (FLUSHED, 10):  # several tokens at once, and across a flush
        texts = [generate(model, cache, tokens, **given) for cache in (laid, plain)]
        assert torch.equal(*texts)
        more = torch.randint(1, 300, (len(LENGTHS), 45))
        ids = torch.cat([texts[0], more], 1)
        real = torch.ones_like(ids)
        real[:, : given["attention_mask"].shape[1]] = given["attention_mask"]
        given = {"input_ids": ids, "attention_mask": real}
    # Runs that average their codes keep the canonical order.
    assert streams(laid) == [name != "average"] * 3
    check(laid)
    assert not any(streams(plain))
    if name == "kivi":
        assert laid.memory().total_bytes >= plain.memory().total_bytes


@pytest.mark.parametrize("name", SHARED)
def test_shared_codes_are_held_and_counted_once(name: str, model, monkeypatch) -> None:
    laid, plain = caches(model, name, monkeypatch)
    for cache in (laid, plain):
        model(torch.randint(1, 300, (2, 32 + 256)), past_key_values=cache)
    # Whole records, so that nothing is filled up.
    assert laid.memory() == plain.memory()
    for cache in (laid, plain):
        cache.batch_select_indices(torch.tensor([1]))
    assert laid.memory() == plain.memory()
    spec = SPECS[name]
    for index, layer in enumerate(laid.layers):
        own, full = layer.store.stream.records, layer.store._complete("stream").records
        for which in ("key", "value"):
            source = spec.source(which, index, 3)
            kept = getattr(laid.layers[source].store.stream.records, f"{which}_codes")
            assert getattr(full, f"{which}_codes") is kept
            assert (getattr(own, f"{which}_codes") is None) == (source != index or kept is None)
    held = [x for layer in laid.layers for x in layer.store.stream.records.buffers]
    memory = laid.memory()
    assert memory.codes_bytes + memory.params_bytes == sum(x.nbytes for x in held)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_run_has_one_order(first: int, model, monkeypatch) -> None:
    """Layers that share codes with one whose scales fit no records have none."""
    laid, plain = caches(model, "chain", monkeypatch)
    ids, step = torch.randint(1, 300, (2, 200)), torch.randint(1, 300, (2, 1))
    model(ids[:, :100], past_key_values=laid)
    assert all(streams(laid))
    laid.reset()
    given = group_records.scales_fit
    asked = []

    def fits(x, form) -> bool:
        asked.append(x)
        odd = asked[2 * first] if len(asked) > 2 * first else None
        return given(x, form) and x is not odd

    monkeypatch.setattr(group_records, "scales_fit", fits)
    for cache in (laid, plain):
        for part in (ids[:, :100], ids[:, 100:], step):
            logits = model(part, past_key_values=cache).logits
            if cache is laid:
                said = logits
    torch.testing.assert_close(said, logits, rtol=1e-9, atol=1e-9)
    assert not any(streams(laid))
    assert laid.memory() == plain.memory()


@pytest.mark.parametrize("name", ["kivi", *LONG[:1], "chain"])
def test_beams_are_the_same(name: str, model, monkeypatch) -> None:
    pair = caches(model, name, monkeypatch)
    ours, theirs = (generate(model, cache, 16, num_beams=2, **prompt()) for cache in pair)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["kivi", *LONG[:1], "chain"])
def test_what_is_cut_picked_and_saved_is_the_same(name: str, model, monkeypatch, tmp_path) -> None:
    pair = caches(model, name, monkeypatch)
    given = prompt()
    for cache in pair:
        generate(model, cache, FLUSHED, **given)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.crop(-11)
        cache.batch_repeat_interleave(2)
        check(cache)
    pair[0].save(tmp_path / "cache.safetensors")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", model)
    step = torch.tensor([[5], [6], [7], [8]])
    mask = torch.ones(4, pair[0].get_seq_length() + 1, dtype=torch.long)
    mask[:2, : max(LENGTHS) - LENGTHS[2]] = 0
    said = [
        model(step, attention_mask=mask, past_key_values=cache).logits for cache in (*pair, loaded)
    ]
    torch.testing.assert_close(said[0], said[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(said[2], said[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["kivi", "chain", pytest.param("xquant", marks=pytest.mark.slow), *LONG[1:2]]
)
def test_frozen_caches_say_the_same(name: str, model, monkeypatch) -> None:
    laid, plain = caches(model, name, monkeypatch)
    ids, said = torch.randint(1, 300, (len(LENGTHS), 40)), []
    for cache in (laid, plain):
        with torch.no_grad():
            model(**prompt(), past_key_values=cache)
        said.append(decode(model, cache, ids, room=40))
    torch.testing.assert_close(*said, rtol=1e-9, atol=1e-9)
    assert all(store.stream.records is not None for store in laid.timeline.frozen.decoder.stores)
    assert laid.memory().total_bytes >= plain.memory().total_bytes
    check(laid)


def test_layers_that_share_codes_hold_still_in_one_order(model, monkeypatch) -> None:
    """One of them cannot lie in records; nothing has left the window yet."""
    laid, plain = caches(model, "one without", monkeypatch)
    ids, said = torch.randint(1, 300, (2, 110)), []
    for cache, room in ((laid, 90), (plain, 0)):
        with torch.no_grad():
            model(ids[:, :20], past_key_values=cache)
        said.append(decode(model, cache, ids[:, 20:], room))
    torch.testing.assert_close(*said, rtol=1e-9, atol=1e-9)
    orders = [store.stream.records is not None for store in laid.timeline.frozen.decoder.stores]
    assert orders == [False, False, True]


@pytest.mark.parametrize("name", ["kivi", "xquant", "chain", *LONG])
def test_dropping_the_longest_sequence_leaves_the_others(name: str, model, monkeypatch) -> None:
    pair = caches(model, name, monkeypatch)
    said = []
    for cache in pair:
        generate(model, cache, 10, **prompt())
        cache.batch_select_indices(torch.tensor([2, 1]))
        torch.manual_seed(2)
        step = torch.randint(1, 300, (2, 60))
        mask = torch.ones(2, cache.get_seq_length() + 60, dtype=torch.long)
        for row, length in enumerate((LENGTHS[2], LENGTHS[1])):
            mask[row, : max(LENGTHS) - length] = 0
        said.append(model(step, attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(said[0], said[1], rtol=1e-9, atol=1e-9)


def test_a_stream_of_uneven_groups_is_not_frozen(model) -> None:
    spec = duotone.scheme("kivi", bits=2).replace(sink=0, recent=0)
    cache = QuantizedCache(model, spec, impl="reference")
    tokens = torch.randint(1, 300, (1, 32))
    for kept in (16, 32):  # blocks of 16 and 16 tokens: whole groups by number only
        model(tokens, past_key_values=cache)
        cache.crop(kept)
    with pytest.raises(ValueError, match="cropped inside a group"):
        cache.timeline.hold_still(8)
    cache.detach()
