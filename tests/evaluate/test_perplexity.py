import copy
import json
import math

import numpy as np
import pytest
import torch
from cli_runs import run
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.evaluate import REFERENCE, evaluate_perplexity
from duotone.evaluate.perplexity import (
    LONGEST_STEP,
    perplexity_score,
    token_losses,
    window_logits,
    window_steps,
)
from duotone.quant import quantize
from duotone.tasks import Passages
from stories import FOLDER, needs_stories, stories, stories_model
from tiny_text import text_model
from tiny_vlm import tiny_model

VOCABULARY = 40


def stream(bits, group, **windows):
    key, value = (TensorSpec(bits, along=along, group=group) for along in ("tokens", "channels"))
    return CacheSpec(visual="text", text=KVSpec(key, value), **windows)


def naive(bits, **fields):
    """Round to nearest: per token, one group per head, no window."""
    tensor = TensorSpec(bits, along="channels", **fields)
    return CacheSpec(visual="text", text=KVSpec(tensor, tensor))


SPECS = {
    "kivi-2": duotone.scheme("kivi", bits=2),  # a window as published, two flushes
    "duotone-stream": duotone.scheme("duotone-stream"),
    "duotone-stream-2": duotone.scheme("duotone-stream", bits=2).replace(recent=16),
    "kivi-2-window-32": duotone.scheme("kivi", bits=2).replace(recent=32),
    "kivi-2-no-window": duotone.scheme("kivi", bits=2).replace(recent=0),
    "xquant": duotone.scheme("xquant").replace(recent=16),
    "xquant-last-dominant": duotone.scheme("xquant", dominant=1).replace(recent=16),
    "xquant-average": duotone.scheme("xquant", gamma=0.6).replace(recent=16),
    "innerq-hybrid-prefill": duotone.scheme("innerq", mapping="hybrid-prefill").replace(
        sink=3, recent=16
    ),
    "innerq-2": duotone.scheme("innerq", bits=2).replace(sink=3, recent=16),
    "groups-of-8-sinks": stream(1, 8, recent=5, sink=3),
    "per-token": naive(2).replace(recent=150),
    "dense": duotone.scheme("dense"),
}


@pytest.fixture(scope="module")
def model():
    """A random Llama in float64, where no rounding decides which code a number gets."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
    texts = {"vocab_size": VOCABULARY, "max_position_embeddings": 256}
    return text_model(**heads, **texts).double()


def texts(*lengths, seed=0):
    drawn = np.random.default_rng(seed)
    return [drawn.integers(0, VOCABULARY, length).tolist() for length in lengths]


def one_at_a_time(model, windows, spec):
    return token_losses(model, windows, spec, longest=1)[0]


@torch.inference_mode()
def generated_losses(model, window, spec):
    """Losses of one window, fed to the cache as `generate` feeds tokens: one per step.

    Normalised keys need a prompt: the tokens before the first flush.
    """
    ids, cache = torch.tensor([window]), duotone.QuantizedCache(model, spec)
    prompt = next(window_steps(spec, len(window) - 1, LONGEST_STEP)).stop if spec.key_norm else 1
    steps = [ids[:, :prompt], *(ids[:, i : i + 1] for i in range(prompt, len(window) - 1))]
    logits = torch.cat([model(input_ids=i, past_key_values=cache).logits for i in steps], 1)
    cache.detach()
    return torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="none")


@pytest.mark.parametrize("name", SPECS)
def test_perplexity_is_that_of_tokens_generated_one_by_one(model, name):
    spec = SPECS[name]
    windows = texts(200 if spec.recent > 99 else 90, 35, 2)
    losses, _ = token_losses(model, windows, spec)
    for row, window in zip(losses, windows, strict=True):
        expected = generated_losses(model, window, spec)
        torch.testing.assert_close(row[: len(expected)], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("longest", [7, 31, 32, 33])
def test_shorter_steps_give_the_same(model, longest):
    """Pieces of a flush interval, single tokens right before a flush among them."""
    windows, spec = texts(120), stream(1, 8, recent=24)
    losses, _ = token_losses(model, windows, spec, longest=longest)
    torch.testing.assert_close(losses, one_at_a_time(model, windows, spec))


def test_a_mixed_scheme_reads_text_as_it_generates():
    model = tiny_model().double()
    window = [ids % 20 + 3 for ids in texts(70)[0]]
    spec = duotone.scheme("duotone-mixed").replace(recent=8, sink=2)
    losses, _ = token_losses(model, [window], spec)
    expected = generated_losses(model, window, spec)
    torch.testing.assert_close(losses[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("longest", [7, 300])
def test_losses_of_float32_logits_have_no_rounding_of_their_own(model, longest):
    """Also where more tokens are read than are widened at a time."""
    narrow, windows = copy.deepcopy(model).float(), [*texts(*[130] * 3), *texts(90)]
    losses, _ = token_losses(narrow, windows, longest=longest)
    with torch.inference_mode():
        read, mask, _ = window_logits(narrow, windows, longest=longest)
        logits = torch.cat([step for _, step in read], 1)
    assert logits.dtype == torch.float32
    targets = torch.tensor([[*window, *[0] * (130 - len(window))] for window in windows])[:, 1:]
    exact = logits.double().logsumexp(-1) - logits.double().gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(losses, exact * mask, rtol=1e-14, atol=1e-14)


def test_without_a_scheme_it_is_the_models_own_loss(model):
    window = texts(80)
    expected = model(input_ids=torch.tensor(window), labels=torch.tensor(window)).loss
    assert token_losses(model, window)[0].mean().item() == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("spec", "tokens", "sizes"),
    [
        (None, 600, [256, 256, 88]),
        (duotone.scheme("dense"), 20, [20]),
        (stream(2, 32, recent=32), 150, [64, 32, 32, 22]),
        (stream(2, 32, recent=32, sink=4), 150, [68, 32, 32, 18]),
        (naive(2), 5, [1, 1, 1, 1, 1]),
        (naive(2).replace(recent=3), 7, [4, 1, 1, 1]),
        (stream(2, 8, recent=249), 280, [256, 1, 1, 7, 8, 7]),
        (duotone.scheme("innerq", mapping="hybrid-prefill").replace(key_norm=False), 3, [1, 1, 1]),
        (duotone.scheme("innerq"), 300, [160, 32, 32, 32, 32, 12]),
        (duotone.scheme("innerq", mapping="hybrid-prefill"), 162, [159, 1, 1, 1]),
    ],
    ids=[
        "16 bit",
        "dense",
        "window",
        "sink",
        "single",
        "single-window",
        "single-at-flush",
        "phases",
        "norms",
        "norms and phases",
    ],
)
def test_steps_reach_from_flush_to_flush(spec, tokens, sizes):
    steps = list(window_steps(spec, tokens, LONGEST_STEP))
    assert [step.stop - step.start for step in steps] == sizes
    assert [step.start for step in steps[1:]] == [step.stop for step in steps[:-1]]


def test_the_interval_resamples_documents():
    score = perplexity_score(np.array([[3.0, 2], [1.0, 2]]))
    assert score.value == pytest.approx(math.exp(1))
    assert score.combine(np.array([[6.0, 4], [2.0, 4]])) == pytest.approx(np.exp([1.5, 0.5]))


def passages(*lengths, context=64):
    return Passages(tuple((tuple(ids),) for ids in texts(*lengths)), context, "digest")


def test_results_have_intervals_bytes_and_a_file(model, tmp_path):
    seen = []
    run = dict(out=tmp_path, batch_size=2, progress=lambda *count: seen.append(count))
    schemes = {"kivi": stream(2, 8, recent=8)}
    evaluation = evaluate_perplexity(model, passages(50, 30, 64), schemes, **run)
    assert seen == [(2, 3), (3, 3)]
    result = evaluation.results["kivi"]
    interval = result["metrics"]["perplexity"]
    assert interval["low"] < interval["value"] < interval["high"]
    assert (result["samples"], result["complete"], result["headline"]) == (3, True, "perplexity")
    assert result["memory"]["bits_per_element"] < 64
    assert duotone.CacheSpec.from_dict(result["configuration"]["spec"]) == schemes["kivi"]
    (path,) = tmp_path.glob("perplexity-kivi-*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [49, 29, 63]
    nats, tokens = (sum(row[name] for row in rows) for name in ("nats", "tokens"))
    assert interval["value"] == pytest.approx(math.exp(nats / tokens))
    again = evaluate_perplexity(model, passages(50, 30, 64), schemes, **run)
    assert again.results == evaluation.results
    assert not again.scores


def test_windows_add_up_to_their_document(model):
    first, second = texts(64, 40)
    split = Passages(((tuple(first), tuple(second)), (tuple(second),)), 64)
    score = evaluate_perplexity(model, split, []).scores[REFERENCE]["perplexity"]
    losses, _ = token_losses(model, [first, second])
    assert score.statistics[0] == pytest.approx([losses.sum().item(), 63 + 39])
    assert score.statistics[1] == pytest.approx([losses[1].sum().item(), 39])


@pytest.mark.parametrize(
    ("data", "schemes", "settings", "message"),
    [
        (passages(9), ["duotone"], {}, "needs a scheme that quantizes text, got 'duotone'"),
        (passages(9), ["vl-cache"], {}, "keeps all tokens, got 'vl-cache'"),
        (Passages((((1, VOCABULARY),),), 8), [], {}, "below the model's vocabulary of 40, got 40"),
        (passages(9, context=300), [], {}, "at most the 256 tokens that the model takes"),
        (passages(9), [], {"samples": 2}, "between 1 and the data's 1 documents, got 2"),
        (passages(9), [], {"batch_size": 0}, "batch_size must be >= 1"),
    ],
    ids=["scheme", "evicting", "vocabulary", "context", "samples", "batch"],
)
def test_misuse_raises(model, data, schemes, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate_perplexity(model, data, schemes, **settings)


# Known answers, measured by others on the same model and texts (the data folder's README).
KNOWN_16_BIT = 5.341
KNOWN_NAIVE = {8: 5.347, 4: 7.79, 2: 74.5, 1: 461}


def all_stories(context=512):
    return Passages(tuple((tuple(ids),) for ids in stories()), context)


def rounding_attention(bits):
    """Attention over K and V of which all, the current token's too, went through the quantizer."""
    spec = TensorSpec(bits, along="channels", param_dtype="float32")

    def attention(module, query, key, value, mask, **kwargs):
        key, value = (quantize(x, spec).dequantize() for x in (key, value))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    return attention


@needs_stories
def test_known_perplexity_of_a_trained_model():
    scores = evaluate_perplexity(stories_model(), all_stories(), [], batch_size=25).scores
    assert scores[REFERENCE]["perplexity"].value == pytest.approx(KNOWN_16_BIT, abs=5e-4)


@needs_stories
@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_known_perplexity_where_every_token_is_rounded(bits):
    """The known answers round the current token's own K and V too, as no cache does."""
    model = stories_model()
    AttentionInterface.register("rounding", rounding_attention(bits))
    AttentionMaskInterface.register("rounding", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("rounding")
    try:
        scores = evaluate_perplexity(model, all_stories(), [], batch_size=25).scores
    finally:
        model.set_attn_implementation(before)
    assert scores[REFERENCE]["perplexity"].value == pytest.approx(KNOWN_NAIVE[bits], rel=6e-4)


@needs_stories
def test_perplexity_through_the_cache_rises_as_bits_fall():
    few = Passages(tuple((tuple(ids[:160]),) for ids in stories()[:8]), 160)
    specs = {str(bits): stream(bits, 32) for bits in (8, 4, 2, 1)}
    scores = evaluate_perplexity(stories_model(), few, specs).scores
    dense, *values = (scores[label]["perplexity"].value for label in (REFERENCE, *specs))
    assert values == sorted(values)
    assert values[0] == pytest.approx(dense, rel=2e-3)
    assert values[3] > 2 * dense


@needs_stories
@pytest.mark.parametrize(
    ("name", "knobs"), [("duotone-stream", {"bits": 2}), ("kivi", {"bits": 2})]
)
def test_perplexity_of_a_trained_model_is_that_of_generated_tokens(name, knobs, tmp_path):
    """By the command; in float64, where no order of summation decides a code."""
    windows = [ids[:length] for ids, length in zip(stories(), (180, 40), strict=False)]
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(windows))
    asked = ("evaluate", "perplexity", "--model", FOLDER, "--data", path, "--dtype", "float64")
    bits = ("--bits", knobs["bits"]) if knobs else ()
    result = run(*asked, "--scheme", name, *bits, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    read = {k: v["metrics"]["perplexity"]["value"] for k, v in json.loads(result.stdout).items()}
    dense = read.pop(REFERENCE)
    ((_, value),) = read.items()
    model, spec = stories_model(torch.float64), duotone.scheme(name, **knobs)
    nats = torch.cat([generated_losses(model, window, spec) for window in windows])
    assert value == pytest.approx(float(nats.mean().exp()), abs=1e-6)
    assert abs(value - dense) > 1e-4
