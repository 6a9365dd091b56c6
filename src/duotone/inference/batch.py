"""One batch through one cache: prompts to tensors, pictures encoded once, greedy answers.

The same prepared batch goes through many caches, so the vision tower, which does not depend on the
cache, runs once. This file knows nothing about tasks, scores or files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from duotone.inference.stopping import StepClock
from duotone.loading import visual_mask

# Families whose language model takes text embeddings with visual ones inserted, and plain
# positions: generate from inputs_embeds then equals generate from ids and pixels.
EMBEDDABLE_FAMILIES = frozenset({"internvl"})


def encode(processor: Any, conversations: Sequence[list[dict]]) -> dict[str, torch.Tensor]:
    """Chat conversations -> left-padded tensors, ready for the model."""
    encoded = processor.apply_chat_template(
        list(conversations),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
    )
    return dict(encoded)


@dataclass(frozen=True)
class Batch:
    """A left-padded batch of B prompts of T tokens.

    model_inputs: arguments of `generate`; visual_mask [B, T]: True at visual tokens.
    pictures_end: T' < T where the first T' tokens are read in a separate step. Later tokens then
        see the cache after that step. 0 for one step.
    pictures_read: the dense cache of these T' tokens, once some scheme has needed it.
    """

    model_inputs: dict[str, torch.Tensor]
    visual_mask: torch.Tensor
    attention_mask: torch.Tensor
    pictures_end: int = 0
    pictures_read: list[Any] = field(default_factory=list, compare=False)

    @property
    def is_embedded(self) -> bool:
        """True if pictures are encoded already."""
        return "inputs_embeds" in self.model_inputs


class SeenPictures:
    """Features of the last pictures, so that several questions encode the pictures once."""

    def __init__(self) -> None:
        self._pixels, self._features = torch.empty(0), torch.empty(0)

    def features(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Features of the pictures from the model's vision tower."""
        if pixels.device != self._pixels.device or not torch.equal(pixels, self._pixels):
            found = model.get_image_features(pixel_values=pixels, return_dict=True)
            self._pixels, self._features = pixels, found.pooler_output
        return self._features


def _embed(
    model: Any,
    inputs: dict[str, torch.Tensor],
    visual_mask: torch.Tensor,
    seen: SeenPictures,
) -> torch.Tensor:
    """Input embeddings [B, T, hidden] with visual embeddings inserted."""
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    if "pixel_values" not in inputs:
        return embeds
    features = seen.features(model, inputs["pixel_values"]).to(embeds)
    if features.numel() != int(visual_mask.sum()) * embeds.shape[-1]:
        raise ValueError(
            f"every visual token of the prompt needs one feature, got {int(visual_mask.sum())} "
            f"tokens and features {tuple(features.shape)}; do model and processor belong together?"
        )
    return embeds.masked_scatter(visual_mask.unsqueeze(-1), features)


@torch.inference_mode()
def prepare(
    model: Any, encoded: dict[str, torch.Tensor], seen: SeenPictures | None = None
) -> Batch:
    """Move an encoded batch to the model and, where the family allows, encode its pictures.

    An encoded batch may have embeddings [B, T, hidden] in place of ids, and a visual_mask [B, T]
    where the ids do not say which tokens are visual.
    seen: keeps the features for the next call with the same model.
    """
    inputs = {name: tensor.to(model.device) for name, tensor in encoded.items()}
    visual, attention_mask = visual_of(model.config, inputs), inputs["attention_mask"]
    inputs.pop("visual_mask", None)
    if "inputs_embeds" in inputs:
        inputs["inputs_embeds"] = inputs["inputs_embeds"].to(model.dtype)
        return Batch(inputs, visual, attention_mask)
    if model.config.model_type in EMBEDDABLE_FAMILIES:
        embeds = _embed(model, inputs, visual, seen or SeenPictures())
        inputs = {"inputs_embeds": embeds, "attention_mask": attention_mask}
    return Batch(inputs, visual, attention_mask)


def visual_of(config: Any, encoded: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[B, T] True at visual tokens of an encoded batch, by its own mask or by its ids."""
    from duotone.hf.model.support import attends_across

    if "visual_mask" in encoded:
        return encoded["visual_mask"].bool()
    if "input_ids" in encoded and not attends_across(config):
        return visual_mask(config, encoded["input_ids"])
    return torch.zeros_like(encoded["attention_mask"], dtype=torch.bool)


def make_cache(model: Any, spec: Any, batch: Batch, impl: str = "auto") -> Any:
    """A fresh cache for a batch: transformers' DynamicCache for None, else a QuantizedCache."""
    if spec is None:
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    from duotone.hf import QuantizedCache

    return QuantizedCache(model, spec, visual_mask=batch.visual_mask, impl=impl)


def _split_places(visual_mask: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """New positions [B, T] of the tokens when pictures and questions are padded separately.

    Returns (positions, tokens of the longest picture part, tokens of the longest question).
    """
    length = visual_mask.shape[1]
    ends = length - visual_mask.flip(1).int().argmax(1, keepdim=True)
    is_question = torch.arange(length, device=real.device) >= ends
    pictures = (real & ~is_question).sum(1, keepdim=True)
    questions = (real & is_question).sum(1, keepdim=True)
    first, second = int(pictures.max()), int(questions.max())
    rank = real.cumsum(1) - 1
    shift = torch.where(is_question, first + second - questions - pictures, first - pictures)
    return rank + shift, first, second


def ask_later(batch: Batch) -> Batch:
    """Copy of a batch that is read in two steps: up to the last picture, then the question.

    The question then sees the quantized cache, as in every turn but the first. In one step the
    question attends to the pictures in full precision, and so does the answer's first token. Then
    no cache can harm answers of one token. Padding stands left of both parts.
    """
    has_pictures = batch.visual_mask.any(1)
    if not batch.is_embedded or not has_pictures.all():
        raise ValueError(
            "a question is asked later only about pictures, by a model of a family in "
            f"{sorted(EMBEDDABLE_FAMILIES)}; got {int((~has_pictures).sum())} prompts without a "
            "picture; ask in one step"
        )
    real = batch.attention_mask.bool()
    places, first, second = _split_places(batch.visual_mask, real)
    rows, columns = real.nonzero(as_tuple=True)
    target = (rows, places[rows, columns])

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.new_zeros(len(tensor), first + second, *tensor.shape[2:])
        out[target] = tensor[rows, columns]
        return out

    attention_mask = moved(batch.attention_mask)
    embeds = moved(batch.model_inputs["inputs_embeds"])
    inputs = {"inputs_embeds": embeds, "attention_mask": attention_mask}
    return Batch(inputs, moved(batch.visual_mask), attention_mask, pictures_end=first)


def share_pictures(batch: Batch, previous: Batch | None) -> Batch:
    """`batch` with the pictures that `previous` has read already (`ask_later`)."""
    end = batch.pictures_end
    if previous is None or not end or end != previous.pictures_end:
        return batch
    for one, other in (
        (batch.attention_mask, previous.attention_mask),
        (batch.model_inputs["inputs_embeds"], previous.model_inputs["inputs_embeds"]),
    ):
        if not torch.equal(one[:, :end], other[:, :end]):
            return batch
    return replace(batch, pictures_read=previous.pictures_read)


@torch.inference_mode()
def read_pictures(model: Any, batch: Batch) -> Batch:
    """Read the pictures of a batch that is asked later, once for all caches; returns the batch.

    Caches that need more than K and V still read the pictures themselves.
    """
    if not batch.pictures_read:
        from transformers import DynamicCache

        dense = DynamicCache(config=model.config)
        _read_pictures(model, batch, dense)
        batch.pictures_read.append(dense)
    return batch


def _read_pictures(model: Any, batch: Batch, cache: Any) -> None:
    """Read the part of the prompts that has a step of its own into an empty cache."""
    from duotone.hf.model.cache_argument import CACHE

    mask = batch.attention_mask[:, : batch.pictures_end]
    model(
        inputs_embeds=batch.model_inputs["inputs_embeds"][:, : batch.pictures_end],
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        **{CACHE: cache},
        use_cache=True,
        logits_to_keep=1,
    )


def _fill_with_pictures(model: Any, batch: Batch, cache: Any) -> None:
    """Put the pictures into an empty cache, from one dense cache for all that need only K and V.

    Eviction depends on queries, and states are no K and V: such caches read the pictures
    themselves.
    """
    from duotone.hf.cache.own_layers import own_layers

    spec = getattr(cache, "spec", None)
    if (spec is not None and spec.evict is not None) or own_layers(cache):
        _read_pictures(model, batch, cache)
        return
    dense, end = read_pictures(model, batch).pictures_read[0], batch.pictures_end
    if hasattr(cache, "absorb"):
        masks = {"visual_mask": batch.visual_mask, "attention_mask": batch.attention_mask}
        cache.absorb(dense, **{name: mask[:, :end] for name, mask in masks.items()})
        return
    for index, layer in enumerate(dense.layers):
        cache.update(layer.keys, layer.values, index)


@dataclass(frozen=True)
class Generated:
    """Answers of a batch: token ids up to and with the end token, and the decode time."""

    token_ids: list[list[int]]
    ms_per_token: float | None = field(default=None)


def end_token_ids(model: Any) -> set[int]:
    """Tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: stop + 1]


@torch.inference_mode()
def generate(
    model: Any,
    batch: Batch,
    cache: Any,
    max_new_tokens: int,
    *,
    timed: bool = False,
    logits_processors: Sequence[Any] = (),
    stopping: Sequence[Any] = (),
) -> Generated:
    """Greedy answers of a batch through `cache`, by the model's own `generate`.

    stopping: more stopping criteria.
    """
    with visual_tokens_of(model, batch):
        return _generate(model, batch, cache, max_new_tokens, timed, logits_processors, stopping)


def visual_tokens_of(model: Any, batch: Batch) -> Any:
    """A context that passes the batch's visual tokens to a model with scales per modality."""
    from duotone.hf.weights.modality import announced

    return announced(model, batch.visual_mask)


def _generate(
    model: Any,
    batch: Batch,
    cache: Any,
    max_new_tokens: int,
    timed: bool,
    logits_processors: Sequence[Any],
    stopping: Sequence[Any],
) -> Generated:
    from duotone.hf.model.cache_argument import CACHE

    if batch.pictures_end:
        _fill_with_pictures(model, batch, cache)
    clock = StepClock(batch.attention_mask.device)
    ends = end_token_ids(model)
    pad = model.generation_config.pad_token_id
    out = model.generate(
        **batch.model_inputs,
        **{CACHE: cache},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=pad if pad is not None else min(ends, default=0),
        stopping_criteria=[*([clock] if timed else []), *stopping],
        logits_processor=list(logits_processors),
    )
    prompt_tokens = 0 if batch.is_embedded else batch.attention_mask.shape[1]
    rows = out[:, prompt_tokens:].tolist()
    return Generated([_until_end(row, ends) for row in rows], clock.ms_per_token)


def decode_answers(processor: Any, token_ids: Sequence[Sequence[int]]) -> list[str]:
    """Answer texts without special tokens and without outer white space."""
    return [text.strip() for text in processor.batch_decode(token_ids, skip_special_tokens=True)]
