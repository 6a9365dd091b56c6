"""The attention function that models call once `duotone` is their attention implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from duotone.attention import attend, decode_attention, measure_importance
from duotone.cache import DenseSegment, Importance
from duotone.hf.cache.states import LazyStates, StaticStates
from duotone.hf.model.masks import as_visibility, causal_visibility
from duotone.quant.autocast import without_autocast

NAME = "duotone"
# Said by torch.compile, which leaves its graph for what a cache does; fullgraph=True refuses that.
NOT_COMPILED = (
    "a QuantizedCache launches kernels of its own; compile without fullgraph=True, or leave the "
    "model as it is: duotone.enable captures decode steps as CUDA graphs."
)
# States that a `QuantizedLayer` hands to its attention.
CACHED = (LazyStates, StaticStates)
# Arguments that change the scores in ways the packed path does not compute.
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask")


def register() -> None:
    """Make the name known to transformers. The mask function is sdpa's: without one, left-padded
    rows would silently attend to padding."""
    AttentionInterface.register(NAME, duotone_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def text_implementation(model: PreTrainedModel) -> str:
    """The name of the language model's attention implementation."""
    return model.config.get_text_config(decoder=True)._attn_implementation


def duotone_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [batch, q_heads, queries, head_dim] -> ([batch, queries, q_heads, value_dim], None).

    Plain tensors (another cache, no cache) go to sdpa. A prompt attends in full precision with the
    model's own mask; one new token attends to the packed segments; a chunk with a past attends to
    the packed past and to its own dense states.
    """
    _check_pair(module, key, value)
    if isinstance(key, CACHED):
        return _cached_attention(module, query, key, value, attention_mask, scaling, kwargs), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


@torch.compiler.disable(reason=NOT_COMPILED)
def _cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: LazyStates | StaticStates,
    value: LazyStates | StaticStates,
    attention_mask: Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:
    _check_arguments(module, kwargs)
    if isinstance(key, StaticStates):
        output = key.layer.decode(query, key.new, value.new, _scale(query, scaling))
        return output.transpose(1, 2).contiguous()
    cache, steps = key.layer.cache, key.layer.cache.steps
    if steps.is_decode_step:
        output = _decode(query, key, attention_mask, scaling, _is_sliding(key, kwargs))
    elif steps.step.start == 0:
        output, _ = sdpa_attention_forward(
            module, query, key.new, value.new, attention_mask, scaling=scaling, **kwargs
        )
        if steps.selection is not None:
            steps.judge(_importance(query, key, attention_mask, scaling))
        cache.commit()
        return output
    else:
        output = _chunk(query, key, value, attention_mask, scaling)
    if not steps.is_stored(key.layer.index):
        cache.commit()
    return output.transpose(1, 2).contiguous()


def _check_pair(module: torch.nn.Module, key: Tensor, value: Tensor) -> None:
    """A model that computes with K or V between cache and attention has only one of them left."""
    if isinstance(key, CACHED) != isinstance(value, CACHED):
        raise NotImplementedError(
            f"{type(module).__name__} changes K or V between the cache and its attention, which "
            "packed codes cannot follow. Use the model's own cache."
        )


def _check_arguments(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} asks for {name!r}, which attention on packed K and V "
                "does not compute. Use the model's own cache."
            )


def _is_sliding(key: LazyStates, kwargs: dict[str, Any]) -> bool:
    facts = key.layer.cache.facts
    return facts.sliding[key.layer.index] or kwargs.get("sliding_window") is not None


def _scale(query: Tensor, scaling: float | None) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def _importance(
    query: Tensor, key: LazyStates, mask: Tensor | None, scaling: float | None
) -> Importance:
    """Attention of the scoring queries to a prompt's tokens, by the model's own mask."""
    steps, tokens = key.layer.cache.steps, query.shape[2]
    place = torch.arange(tokens, device=query.device)
    given = None if mask is None else as_visibility(mask, tokens)

    def visible(rows: slice) -> Tensor:
        # The model leaves its mask out only where no token is padding.
        seen = (place <= place[rows, None])[None] if given is None else given[:, rows]
        return seen.expand(len(query), -1, -1)

    weights = steps.selection.weights
    weights = weights if steps.order is None else weights.gather(1, steps.order)
    with without_autocast(query.device):
        return measure_importance(query, key.new, weights, visible, _scale(query, scaling))


def _decode(
    query: Tensor, key: LazyStates, mask: Tensor | None, scaling: float | None, sliding: bool
) -> Tensor:
    # Padding is stored nowhere, so only a sliding window still needs the model's mask.
    visible = as_visibility(mask, 1) if sliding and mask is not None else None
    cache = key.layer.cache
    segments = key.layer.segments(mask=visible)
    sm_scale = _scale(query, scaling)
    # Under autocast the query may be of another type than what is stored; kernels take one.
    typed = query.to(key.layer.store.dtype)
    given = {"tau": cache.spec.tau, "impl": cache.impl, "slow": cache.slow}
    return decode_attention(typed, segments, sm_scale=sm_scale, **given).to(query.dtype)


def _chunk(
    query: Tensor, key: LazyStates, value: LazyStates, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Several queries against the packed past and this step's own dense states."""
    queries, past = query.shape[2], key.layer.cache.steps.step.start
    if mask is None:
        visible = causal_visibility(queries, past + queries, query.device)
    else:
        visible = as_visibility(mask, queries)
    visible = visible.expand(query.shape[0], -1, -1)
    own = DenseSegment(
        key.new,
        value.new,
        torch.full((query.shape[0],), queries, device=query.device),
        mask=visible[:, :, past : past + queries],
    )
    segments = [*key.layer.segments(before=True, mask=visible), own]
    return attend(query, segments, sm_scale=_scale(query, scaling), tau=key.layer.cache.spec.tau)
