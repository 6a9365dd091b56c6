"""The attention function that models call once `duotone` is their attention implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from duotone.attention import attend_chunk, decode_attention, in_order_for, measure_importance
from duotone.cache import DenseSegment, Importance, Visibility
from duotone.hf.attachment import Attachment, current_call
from duotone.hf.cache.capped import attend_capped, dense_capped
from duotone.hf.cache.states import LazyStates, StaticStates
from duotone.hf.cache.timeline import Step
from duotone.hf.cache.windows import RingStates
from duotone.hf.model.masks import as_visibility, causal_visibility
from duotone.hf.model.text_attention import NAME, NOT_COMPILED
from duotone.quant.autocast import without_autocast

# States that a `QuantizedLayer` hands to its attention, and those of any layer of a cache.
CACHED = (LazyStates, StaticStates)
OF_LAYERS = (*CACHED, RingStates)
# Arguments that change the scores in ways the packed path does not compute.
UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "head_mask")


def attach(model: PreTrainedModel) -> Attachment:
    """Make `duotone_attention` the model's, or count one more holder where it is.

    The mask function is sdpa's: without one, left-padded rows would silently attend to padding.
    """
    AttentionInterface.register(NAME, duotone_attention)
    AttentionMaskInterface.register(NAME, step_mask)
    return Attachment.to(model)


def step_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Make sdpa's mask, or none for a step in fixed buffers, which know what its query sees.

    A replay would look up the masks of later tokens in tables as long as at the capture.
    """
    if not torch.compiler.is_compiling():
        call = current_call()
        if call is not None and call.claimed:
            return None
    return sdpa_mask(*args, **kwargs)


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
    if attention_mask is None:
        attention_mask = _mask_of_last(module, query, key)
    if isinstance(key, RingStates):
        key, value, attention_mask = key.kept, value.kept, key.mask
    if isinstance(key, CACHED):
        return _cached_attention(module, query, key, value, attention_mask, scaling, kwargs), None
    if (softcap := kwargs.get("softcap")) is not None:
        sm_scale = _scale(query, scaling)
        output = dense_capped(query, key, value, attention_mask, sm_scale, softcap)
        return output.transpose(1, 2).contiguous(), None
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
    timeline, softcap = key.timeline, kwargs.get("softcap")
    if softcap != timeline.facts.softcap:
        raise NotImplementedError(
            f"{type(module).__name__} must cap scores as its config says, at "
            f"{timeline.facts.softcap}; got softcap={softcap}. Use the model's own cache."
        )
    if isinstance(key, StaticStates):
        frozen, sm_scale = timeline.frozen, _scale(query, scaling)
        query = frozen.scales.of_queries(key.index, query)
        new = frozen.scales.of_store(key.index, key.new)
        output = frozen.decoder.attend(key.index, query, new, value.new, sm_scale)
        return output.transpose(1, 2).contiguous()
    if timeline.step.decodes:
        output = _decode(query, key, attention_mask, scaling, _is_sliding(key, kwargs))
        return output.transpose(1, 2).contiguous()
    if timeline.step.start == 0 and softcap is not None:
        sm_scale = _scale(query, scaling)
        output = dense_capped(query, key.new, value.new, attention_mask, sm_scale, softcap)
        return output.transpose(1, 2).contiguous()
    if timeline.step.start == 0:
        with in_order_for(query, key.new.shape[2], masked=attention_mask is not None):
            output, _ = sdpa_attention_forward(
                module, query, key.new, value.new, attention_mask, scaling=scaling, **kwargs
            )
        if timeline.selection is not None:
            timeline.judge(_importance(query, key, attention_mask, scaling))
        return output
    output = _chunk(query, key, value, attention_mask, scaling)
    if key.index != timeline.facts.source:  # later layers read its past, too
        timeline.commit_due()
    return output.transpose(1, 2).contiguous()


def _mask_of_last(module: torch.nn.Module, query: Tensor, key: Tensor) -> Tensor | None:
    """Mask [1, 1, queries, tokens] for the last few queries alone, where a model gives none.

    A model may drop the others before layers that read K and V of earlier ones. It spares "sdpa",
    which takes the first query for the first token's, by its name.
    """
    queries, tokens = query.shape[2], key.shape[2]
    if not 1 < queries < tokens or not getattr(module, "is_causal", True):
        return None
    return causal_visibility(queries, tokens, query.device)[:, None]


def _check_pair(module: torch.nn.Module, key: Tensor, value: Tensor) -> None:
    """A model that computes with K or V between cache and attention has only one of them left."""
    if isinstance(key, OF_LAYERS) != isinstance(value, OF_LAYERS):
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
    return key.timeline.facts.sliding[key.index] or kwargs.get("sliding_window") is not None


def _scale(query: Tensor, scaling: float | None) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def _importance(
    query: Tensor, key: LazyStates, mask: Tensor | None, scaling: float | None
) -> Importance:
    """Attention of the scoring queries to a prompt's tokens, by the model's own mask."""
    timeline, tokens = key.timeline, query.shape[2]
    place = torch.arange(tokens, device=query.device)
    given = None if mask is None else as_visibility(mask, tokens)

    def visible(rows: slice) -> Tensor:
        # The model leaves its mask out only where no token is padding.
        seen = (place <= place[rows, None])[None] if given is None else given[:, rows]
        return seen.expand(len(query), -1, -1)

    weights, order = timeline.selection.weights, timeline.order
    weights = weights if order is None else weights.gather(1, order)
    with without_autocast(query.device):
        return measure_importance(query, key.new, weights, visible, _scale(query, scaling))


def _decode(
    query: Tensor, key: LazyStates, mask: Tensor | None, scaling: float | None, sliding: bool
) -> Tensor:
    # Padding is stored nowhere, so only a sliding window still needs the model's mask.
    visible = as_visibility(mask, 1) if sliding and mask is not None else None
    timeline = key.timeline
    segments = timeline.segments(key.index, seen=None if visible is None else Visibility(visible))
    sm_scale, query = _scale(query, scaling), timeline.scales.of_queries(key.index, query)
    # Under autocast the query may be of another type than what is stored; kernels take one.
    typed = query.to(timeline.stores[key.index].dtype)
    if (softcap := timeline.facts.softcap) is not None:
        return attend_capped(typed, segments, sm_scale, softcap, timeline.slow).to(query.dtype)
    given = {"tau": timeline.spec.tau, "impl": timeline.impl, "slow": timeline.slow}
    return decode_attention(typed, segments, sm_scale=sm_scale, **given).to(query.dtype)


def _chunk(
    query: Tensor, key: LazyStates, value: LazyStates, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Queries against the packed past and this step's own dense states.

    There is a query per token of the step, or the last few alone.
    """
    timeline, step = key.timeline, key.timeline.step
    seen = _seen(step, query, mask)
    lengths, own_mask = seen.once(lambda: _of_own(step, seen), step)
    own = DenseSegment(
        timeline.scales.of_store(key.index, key.new), value.new, lengths, mask=own_mask
    )
    segments = [*timeline.segments(key.index, before=True, seen=seen), own]
    sm_scale, query = _scale(query, scaling), timeline.scales.of_queries(key.index, query)
    if (softcap := timeline.facts.softcap) is not None:
        return attend_capped(query, segments, sm_scale, softcap, timeline.slow)
    given = {"tau": timeline.spec.tau, "slow": timeline.slow}
    return attend_chunk(query, segments, sm_scale=sm_scale, seen=seen, **given)


def _seen(step: Step, query: Tensor, mask: Tensor | None) -> Visibility:
    """The model's mask of a step's queries: one object for the layers that get one mask."""
    queries = query.shape[2]
    for given, seen in step.seen:
        if given is mask and seen.mask.shape[1] == queries:
            return seen
    if mask is None:
        visible = causal_visibility(queries, step.start + step.tokens, query.device)
    else:
        visible = as_visibility(mask, queries)
    seen = Visibility(visible.expand(len(query), -1, -1))
    # Layers with windows get another mask than layers without.
    step.seen[:] = [*step.seen[-1:], (mask, seen)]
    return seen


def _of_own(step: Step, seen: Visibility) -> tuple[Tensor, Tensor]:
    """Lengths and mask of a step's own tokens."""
    lengths = torch.full((len(seen.mask),), step.tokens, device=seen.mask.device)
    return lengths, seen.mask[:, :, step.start : step.start + step.tokens]
