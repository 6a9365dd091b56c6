"""Masks of a step's visual tokens and of its padding, from the model's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.hf.model.facts import ModelFacts


def visual_tokens(
    facts: ModelFacts,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    explicit: Tensor | None,
    span: slice,
    places: Tensor | None = None,
) -> Tensor:
    """[batch, tokens] True at visual tokens of this step.

    explicit: the caller's mask over the whole prompt; `span` is this step's place in it. places:
    the model's own mask of them, `facts.mask_input`. Without both, the ids decide. A single token
    after others was generated and is text, whatever its id: a placeholder that the model wrote has
    no picture.
    """
    given = input_ids if input_ids is not None else inputs_embeds
    batch, tokens = given.shape[:2]
    none = torch.zeros(batch, tokens, dtype=torch.bool, device=given.device)
    if explicit is not None and span.start < explicit.shape[1]:
        return _explicit_part(explicit, none, span)
    if tokens == 1 and span.start:
        return none
    if facts.mask_input is not None:
        return none if places is None else places[:, -tokens:].to(none.device, torch.bool)
    if not facts.is_multimodal:
        return none
    if input_ids is not None and facts.visual_token_ids:
        return is_one_of(input_ids, facts.visual_token_ids)
    if tokens == 1:
        return none
    if input_ids is None:
        raise ValueError(
            "with inputs_embeds the positions of visual tokens are unknown; pass "
            "visual_mask=[batch, tokens] to QuantizedCache or enable (all False: no image)."
        )
    raise ValueError(
        f"{facts.model_type!r} has no ids of visual tokens, and this step's tokens "
        f"{span.start} to {span.stop - 1} lie past its visual_mask; set cache.visual_mask to a "
        "mask [batch, tokens] of the whole conversation first."
    )


def is_one_of(tokens: Tensor, ids: tuple[int, ...]) -> Tensor:
    """True where a token [batch, tokens] is one of these."""
    return torch.isin(tokens, torch.tensor(ids, device=tokens.device, dtype=tokens.dtype))


def _explicit_part(explicit: Tensor, none: Tensor, span: slice) -> Tensor:
    batch, rows = len(none), len(explicit)
    if explicit.dim() != 2 or batch % rows:
        raise ValueError(
            f"visual_mask must be [batch, tokens] with a batch that divides {batch}; "
            f"got {tuple(explicit.shape)}."
        )
    if span.stop > explicit.shape[1]:
        raise ValueError(
            f"visual_mask must cover every step that it begins in, tokens {span.start} to "
            f"{span.stop - 1} here; got {tuple(explicit.shape)}. Make it of all input_ids."
        )
    part = explicit[:, span].to(device=none.device, dtype=torch.bool)
    return part.repeat_interleave(batch // rows, 0)


def real_tokens(
    attention_mask: Tensor | None, batch: int, tokens: int, device: torch.device, seen: int = 0
) -> Tensor:
    """[batch, tokens] False at padding. The model's mask covers the past, `seen`, and this step."""
    if attention_mask is None:
        return torch.ones(batch, tokens, dtype=torch.bool, device=device)
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        shape = getattr(attention_mask, "shape", type(attention_mask).__name__)
        raise ValueError(
            f"attention_mask must be the 2-D padding mask [batch, tokens]; got {shape}. "
            "Custom 4-D masks are not supported by quantized caches."
        )
    # Of another width, its last columns would be other tokens' than this step's.
    if tuple(attention_mask.shape) != (batch, seen + tokens):
        raise ValueError(
            f"attention_mask must cover {batch} x ({seen} cached + {tokens} new) tokens; got "
            f"{tuple(attention_mask.shape)}. Give only new input_ids, and keep use_cache on."
        )
    return attention_mask[:, -tokens:].to(device).bool()


def as_visibility(mask: Tensor, queries: int) -> Tensor:
    """A model's 4-D mask (bool, or additive 0 / -inf) as [batch, queries, logical] booleans."""
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != queries:
        raise ValueError(
            f"expected an attention mask [batch, 1, {queries}, tokens]; got {tuple(mask.shape)}. "
            "Masks per head are not supported by quantized caches."
        )
    mask = mask.squeeze(1)
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not (visible | (mask <= torch.finfo(mask.dtype).min / 2)).all():
        raise ValueError(
            "an additive attention mask may hold 0 and -inf only; got other values. "
            "Score biases are not supported by quantized caches."
        )
    return visible


def causal_visibility(queries: int, tokens: int, device: torch.device) -> Tensor:
    """[1, queries, tokens]: the last `queries` of `tokens` tokens see themselves and the past."""
    place = torch.arange(tokens, device=device)
    return (place <= place[tokens - queries :, None])[None]
