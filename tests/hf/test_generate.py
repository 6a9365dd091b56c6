"""`generate` with packed caches against the stock 16-bit cache, on every supported family."""

from typing import Any

import pytest
import torch
from graph_answers import batch_of
from torch import Tensor
from transformers import PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec

from families import (
    FAMILIES,
    IMAGE,
    LOGIT_TOLERANCE,
    MORE,
    MULTIMODAL,
    TEXT_ONLY,
    inputs,
    logit_error,
    tiny_model,
)

EIGHT = TensorSpec(8)
VISUAL = CacheSpec(visual=KVSpec(EIGHT, EIGHT))
STREAM = CacheSpec(
    visual="text",
    text=KVSpec(TensorSpec(8, group=4), TensorSpec(8, along="channels", group=8)),
    sink=2,
    recent=3,
)
MIXED = STREAM.replace(visual=KVSpec(EIGHT, TensorSpec(8, along="channels")), ranges="run")
SPECS = {"visual": VISUAL, "stream": STREAM, "mixed": MIXED}
# A text-only model has no visual tokens to treat apart.
CASES = [(n, p) for n in FAMILIES for p in SPECS if p != "visual" or n not in TEXT_ONLY]
NEW = 10
LATER = [family.name for family in MORE]
# Phi-4's own calls fail where candidates are ids of a picture: transformers keeps its pixels.
LOOKED_UP = [name for name in LATER if name != "phi4_multimodal"]
# Of later families some have next tokens that are almost as likely, within 8 bits' rounding.
EIGHT_BIT = [(n, p) for n, p in CASES if p != "stream" and n not in LATER]
# Their positions count the pictures of the whole conversation, so that transformers takes none in
# a later turn.
TEXT_TURNS = ("qwen3_vl_moe", "glm4v_moe")


def run(
    model: PreTrainedModel, given: dict[str, Tensor], spec: CacheSpec | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """(tokens, logits of each step) of one generate call, 16-bit without a spec."""
    kwargs = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    kwargs |= {"return_dict_in_generate": True, "output_logits": True}
    if spec is None:
        out = model.generate(**given, **kwargs)
    else:
        with duotone.enable(model, spec):
            out = model.generate(**given, **kwargs)
    return out.sequences, torch.stack(out.logits)


def assert_same_run(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """Compare tokens, and logits to float tolerance (relative to their spread)."""
    assert torch.equal(ours[0], theirs[0])
    error = logit_error(ours[1], theirs[1])
    assert error < LOGIT_TOLERANCE, f"logits differ by {error:.2e} of their spread"


def test_comparison_rejects_different_logits() -> None:
    tokens, logits = torch.zeros(2, 3), torch.randn(4, 2, 9)
    with pytest.raises(AssertionError, match="logits differ"):
        assert_same_run((tokens, logits + 0.01), (tokens, logits))
    with pytest.raises(AssertionError):
        assert_same_run((tokens + 1, logits), (tokens, logits))


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize(("name", "policy"), CASES)
def test_exact_codec_reproduces_16_bit(name: str, policy: str) -> None:
    model, given = tiny_model(name), batch_of(name)
    assert_same_run(run(model, given, SPECS[policy]), run(model, given))


@pytest.mark.parametrize(("name", "policy"), EIGHT_BIT)
def test_8_bit_tokens_agree(name: str, policy: str) -> None:
    model, given = tiny_model(name), batch_of(name)
    ours, theirs = run(model, given, SPECS[policy]), run(model, given)
    assert torch.equal(ours[0], theirs[0])
    assert not torch.equal(ours[1], theirs[1]), "nothing was quantized"


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", [n for n in MULTIMODAL if FAMILIES[n].video is not None])
def test_video_tokens_are_visual(name: str) -> None:
    model = tiny_model(name)
    given = inputs(name, [[3, "video", 9], [2, "video", 4]])
    assert_same_run(run(model, given, VISUAL), run(model, given))
    with duotone.enable(model, VISUAL) as session:
        model.generate(**given, max_new_tokens=2)
    assert session.cache.ledger.state.visual.lengths.tolist() == [FAMILIES[name].video_tokens] * 2


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("tau", [None, (0.0, 1.0)], ids=["plain", "calibrated"])
def test_inputs_embeds_need_and_use_an_explicit_mask(tau: tuple[float, float] | None) -> None:
    model, given = tiny_model("internvl"), batch_of("internvl")
    spec = VISUAL.replace(tau=tau)
    reference = run(model, given, spec)[1]
    embeds = merged_embeddings(model, given)
    with duotone.enable(model, spec, visual_mask=given["input_ids"] == IMAGE):
        masked = {"inputs_embeds": embeds, "attention_mask": given["attention_mask"]}
        out = run(model, masked)
    assert logit_error(out[1], reference) < LOGIT_TOLERANCE
    with duotone.enable(model, VISUAL), pytest.raises(ValueError, match="visual_mask"):
        run(model, masked)


def merged_embeddings(model: PreTrainedModel, given: dict[str, Tensor]) -> Tensor:
    embeds = model.get_input_embeddings()(given["input_ids"])
    features = model.get_image_features(pixel_values=given["pixel_values"])
    features = getattr(features, "pooler_output", features)
    flat = features.reshape(-1, embeds.shape[-1])
    return embeds.masked_scatter((given["input_ids"] == IMAGE).unsqueeze(-1), flat)


DECODING = {
    "beam": {"num_beams": 3},
    "beam-return-2": {"num_beams": 3, "num_return_sequences": 2},
    "sample": {"do_sample": True, "top_k": 20},
    "sample-return-3": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("mode", DECODING)
@pytest.mark.parametrize("name", ["internvl", "qwen2_vl", "llama", *LATER])
def test_decoding_modes(name: str, mode: str) -> None:
    model, given = tiny_model(name), batch_of(name)
    results = []
    for spec in (MIXED, None):
        torch.manual_seed(7)
        results.append(run(model, given, spec, **DECODING[mode])[0])
    assert torch.equal(*results)


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("policy", SPECS)
@pytest.mark.parametrize("name", ["internvl", "llava", "gemma3", "llava_onevision", *LATER])
def test_second_turn_with_another_image(name: str, policy: str) -> None:
    model = tiny_model(name)
    first = inputs(name, [[3, "image", 9], [3, "image", 6]])
    answers = []
    ours = QuantizedCache(model, SPECS[policy])
    for cache in (ours, None):
        out = model.generate(
            **first, past_key_values=cache, max_new_tokens=5, return_dict_in_generate=True
        )
        second = later_turn(name, first, out.sequences)
        answers.append(
            model.generate(**second, past_key_values=out.past_key_values, max_new_tokens=NEW)
        )
    assert torch.equal(*answers)
    if policy != "stream":
        tokens = FAMILIES[name].image_tokens * (1 if name in TEXT_TURNS else 2)
        assert ours.ledger.state.visual.lengths.tolist() == [tokens, tokens]


def later_turn(name: str, first: dict[str, Tensor], answer: Tensor) -> dict[str, Tensor]:
    """The conversation so far plus a question about a second picture."""
    extra = inputs(name, [[9] if name in TEXT_TURNS else [4, "image", 5]] * 2, seed=5)
    ids = torch.cat([answer, extra["input_ids"]], 1)
    pad = torch.ones(2, ids.shape[1] - first["input_ids"].shape[1], dtype=torch.long)
    joined = {
        "input_ids": ids,
        "attention_mask": torch.cat([first["attention_mask"], pad], 1),
        **FAMILIES[name].extra(ids),
    }
    # With a cache, generate wants the pixels of the tokens that are not in it yet.
    return {**extra, **joined}


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", TEXT_ONLY)
def test_chunked_prefill(name: str) -> None:
    model, given = tiny_model(name), batch_of(name)
    ours = run(model, given, STREAM, prefill_chunk_size=5)
    assert torch.equal(ours[0], run(model, given)[0])


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_chunked_prefill_by_hand_splits_visual_spans(chunk: int) -> None:
    model, given = tiny_model("internvl"), batch_of("internvl")
    embeds, mask = merged_embeddings(model, given), given["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        whole = model(inputs_embeds=embeds, attention_mask=mask, position_ids=positions).logits
        cache = QuantizedCache(model, VISUAL, visual_mask=given["input_ids"] == IMAGE)
        pieces = []
        for start in range(0, embeds.shape[1], chunk):
            part = slice(start, start + chunk)
            out = model(
                inputs_embeds=embeds[:, part],
                attention_mask=mask[:, : part.stop],
                position_ids=positions[:, part],
                past_key_values=cache,
            )
            pieces.append(out.logits)
    real = mask.bool()
    assert logit_error(torch.cat(pieces, 1)[real], whole[real]) < LOGIT_TOLERANCE


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", ["internvl", "llama", *LOOKED_UP])
def test_prompt_lookup_crops_candidates(name: str) -> None:
    model = tiny_model(name)
    given = inputs(name, [[20]] if name in TEXT_ONLY else [[6, "image", 8]])
    given["input_ids"] = torch.cat([given["input_ids"], given["input_ids"][:, -6:]], 1)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given |= FAMILIES[name].extra(given["input_ids"])
    ours = run(model, given, MIXED, prompt_lookup_num_tokens=4)[0]
    assert torch.equal(ours, run(model, given)[0])


@pytest.mark.parametrize("name", ["internvl", "qwen3_vl"])
def test_drafts_that_come_with_a_picture_can_be_refused(name: str) -> None:
    """The first step brings the prompt and its drafts, in qwen3_vl with a placeholder among them.

    Presets keep a picture whole.
    """
    model = tiny_model(name)
    given = inputs(name, [[6, "image", 8]])
    given["input_ids"] = torch.cat([given["input_ids"], given["input_ids"][:, -6:]], 1)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given |= FAMILIES[name].extra(given["input_ids"])
    for spec in (duotone.scheme("duotone"), duotone.scheme("duotone-mixed")):
        assert spec.background is not None
        ours = run(model, given, spec, prompt_lookup_num_tokens=4)[0]
        assert torch.equal(ours, run(model, given, spec)[0])
