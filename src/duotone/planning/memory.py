"""Memory of a scheme on a model, and the number of sequences that fit, before anything runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from duotone.attention import Shape, resolve_layers
from duotone.attention.plan import alike
from duotone.hf.model.cache_bytes import cache_bytes
from duotone.hf.model.extreme_keys import warn_of_extreme_keys, with_wide_parameters
from duotone.hf.model.facts import ModelFacts, model_facts
from duotone.hf.model.spec_checks import check_spec
from duotone.planning.card import Card, card_of, check_memory
from duotone.planning.shapes import SHAPE_8B
from duotone.quant import CacheSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from duotone.weights.methods.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """Cache bytes of one sequence at its full length, and sequences per budget.

    codes_bytes, params_bytes, dense_bytes: parts of bytes_per_sequence, as `MemoryReport` counts
    them (without its index and spare slots). The rest stays transformers' own, and is the report's
    state_bytes: windows_bytes, states_bytes (of fixed size) and pictures_bytes (K and V of cross
    layers). Both totals have these. None and in no total: of unknown size, as `uncounted` says.
    budget_bytes: memory for caches, as given or as `card` leaves it. max_batch, dense_max_batch:
    sequences whose caches fit it, with this scheme and with 16 bit; None without a budget.
    card: weights, reserve and caches, where all memory of a card was given.
    """

    visual_tokens: int
    text_tokens: int
    new_tokens: int
    codes_bytes: int
    params_bytes: int
    dense_bytes: int
    bytes_per_sequence: int
    dense_equivalent_bytes: int
    bits_per_element: float
    nominal_bits: float
    budget_bytes: int | None
    max_batch: int | None
    dense_max_batch: int | None
    card: Card | None = None
    windows_bytes: int = 0
    states_bytes: int | None = 0
    pictures_bytes: int | None = 0
    uncounted: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-safe data."""
        return asdict(self)


def plan(
    model_or_config: PreTrainedModel | PreTrainedConfig | ModelFacts,
    spec: CacheSpec,
    *,
    visual_tokens: int = 0,
    text_tokens: int = 0,
    new_tokens: int = 0,
    images: int = 1,
    budget_bytes: int | None = None,
    memory_bytes: int | None = None,
    weights: str | Recipe | None = None,
    reserve_bytes: int | None = None,
) -> Plan:
    """Predict the cache of one sequence, and the sequences that fit.

    Which tokens an evicting scheme drops depends on scores. The plan takes equal shares of visual
    and text tokens and, where layers share their budget by sparsity, equal layers. The plan is
    exact for 16-bit tokens, whose number over all layers is fixed, and an estimate for codes.

    visual_tokens, text_tokens: of the prompt. new_tokens: generated and fed back. images: number of
    equal runs of visual tokens, which matters where a scheme has a range per run. Of a model whose
    layers attend to pictures next to the tokens: number of these pictures, or 0.
    budget_bytes: memory for caches alone. memory_bytes: all memory of a card instead, of which
    weights and a reserve are taken off. weights: a recipe of `duotone quantize` or its name; None:
    as the model or its config has them. reserve_bytes: for all else; None: a tenth of the memory.
    Errors: ValueError for negative counts, no tokens, more images than visual tokens, or an
    unsupported model. The same for both kinds of memory, and for weights that no config has.
    """
    counts = {"visual_tokens": visual_tokens, "text_tokens": text_tokens, "new_tokens": new_tokens}
    _check_counts({**counts, "images": images, "budget_bytes": budget_bytes or 0})
    check_memory(budget_bytes, memory_bytes, reserve_bytes, weights)
    known = isinstance(model_or_config, ModelFacts)
    facts = model_or_config if known else model_facts(model_or_config)
    _check_images(images, visual_tokens, facts)
    check_spec(facts, spec)
    if hasattr(model_or_config, "get_decoder"):
        warn_of_extreme_keys(model_or_config, facts, spec)
        spec = with_wide_parameters(model_or_config, facts, spec)
    held = cache_bytes(facts, spec, **counts, images=images)
    tokens, total, dense_total = sum(counts.values()), held.total, held.dense_equivalent
    card = None
    if memory_bytes is not None:
        memory = (memory_bytes, reserve_bytes)
        card = card_of(model_or_config, weights, *memory, total, dense_total)
        budget_bytes = card.chosen.caches_bytes
    return Plan(
        **counts,
        codes_bytes=held.codes,
        params_bytes=held.params,
        dense_bytes=held.dense,
        bytes_per_sequence=total,
        dense_equivalent_bytes=dense_total,
        bits_per_element=8 * held.packed / (tokens * facts.elements),
        nominal_bits=spec.nominal_bits(facts.layers),
        budget_bytes=budget_bytes,
        max_batch=None if budget_bytes is None else budget_bytes // total,
        dense_max_batch=None if budget_bytes is None else budget_bytes // dense_total,
        card=card,
        windows_bytes=held.windows,
        states_bytes=held.states,
        pictures_bytes=held.pictures,
        uncounted=_uncounted(facts),
    )


def _uncounted(facts: ModelFacts) -> str | None:
    """Words for what a cache holds next to all that is counted; None where that is all."""
    parts = {
        f"states of {len(facts.states)} layers": facts.state_bytes is None,
        f"K and V of pictures in {len(facts.crosses)} layers": facts.picture_bytes is None,
        "keys of indexers": facts.is_indexed,
    }
    found = [words for words, is_unknown in parts.items() if is_unknown]
    if not found:
        return None
    return f"{' and '.join(found)}, of a size that configs of {facts.model_type!r} do not say"


def attention_paths(
    facts: ModelFacts, spec: CacheSpec, device: torch.device | None = None
) -> list[dict[str, Any]]:
    """Implementation per kind of tokens, as plain data: a dictionary per group of layers.

    layers: their numbers. tokens: as `attention.plan` names them. runs: "cuda", "triton" or
    "reference". why: reason against the CUDA kernels, or None. device: None: an H200.
    """
    if why := facts.against_kernels:
        every, kinds = list(range(facts.layers)), ("visual", "text", "dense")
        return [{"layers": every, "tokens": x, "runs": "reference", "why": why} for x in kinds]
    dtype = {2: torch.bfloat16, 4: torch.float32}.get(facts.element_bytes, torch.float64)
    shapes = [Shape(each.head_dim, each.q_heads, each.kv_heads, dtype) for each in facts.shapes]
    return [
        {"layers": layers, "tokens": tokens, "runs": plan.readers[tokens].impl, "why": why}
        for layers, plan in alike(resolve_layers(spec, facts.sliding, shapes, device))
        for tokens, why in plan.reasons.items()
    ]


def true_bits(spec: CacheSpec, tokens: int = 8192, facts: ModelFacts = SHAPE_8B) -> float:
    """True bits per number over `tokens` that the spec quantizes, windows in 16 bit included.

    Visual tokens of one image where it has a policy for them, tokens of the stream otherwise.
    """
    kind = "text_tokens" if spec.visual == "text" else "visual_tokens"
    return plan(facts, spec, **{kind: tokens}).bits_per_element


def _check_counts(counts: dict[str, int]) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer >= 0; got {value!r}.")
    if not counts["visual_tokens"] + counts["text_tokens"] + counts["new_tokens"]:
        raise ValueError("a plan needs tokens; got 0 visual, 0 text and 0 new ones.")


def _check_images(images: int, visual_tokens: int, facts: ModelFacts) -> None:
    if visual_tokens and images < 1 and not facts.crosses:
        raise ValueError("visual tokens come in at least one image; got images=0.")
    if images > max(1, visual_tokens) and not facts.crosses:
        raise ValueError(
            f"an image has at least one visual token; got {images} images of {visual_tokens} "
            "visual tokens. Give the visual tokens of all images of a sequence together, or fewer "
            "images."
        )
