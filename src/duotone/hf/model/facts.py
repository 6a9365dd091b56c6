"""Facts of a model: its visual tokens and the shapes and kinds of its layers.

Facts come from the config, not from patches. A model that cannot be served correctly raises here,
by name, before any work is done.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from duotone.hf.model.layers import (
    ANSWER_TYPE,
    CHUNK_TYPE,
    CROSS_TYPE,
    EMPTY_TYPES,
    INDEXED_TYPE,
    MASKED_TYPES,
    READER_TYPE,
    STATE_TYPES,
    LayerShape,
    layer_configs,
    layer_kinds,
    layer_shape,
    numbers_of,
    own_windows,
    packed_layers,
    window_of,
)
from duotone.hf.model.own_bytes import picture_bytes, state_bytes
from duotone.hf.model.support import (
    attends_across,
    check_sinks,
    check_supported,
    input_of_places,
    takes_pictures,
)

logger = logging.get_logger(__name__)

# Families that the test suite runs end to end, and the inputs that it gives them. Others pass the
# structural checks below or raise.
TESTED_FAMILIES = {
    "aya_vision": ("pictures",),
    "bamba": ("text",),
    "chameleon": ("pictures",),
    "cohere2": ("text",),
    "emu3": ("pictures",),
    "gemma3": ("pictures",),
    "gemma3n_text": ("text",),
    "gemma4": ("pictures",),
    "glm4v": ("pictures",),
    "glm4v_moe": ("pictures",),
    "granitemoehybrid": ("text",),
    "idefics2": ("pictures",),
    "idefics3": ("pictures",),
    "internvl": ("pictures",),
    "jamba": ("text",),
    "lfm2": ("text",),
    "lfm2_moe": ("text",),
    "lfm2_vl": ("pictures",),
    "lighton_ocr": ("pictures",),
    "llama": ("text",),
    "llama4": ("pictures",),
    "llava": ("pictures",),
    "llava_next": ("pictures",),
    "llava_next_video": ("pictures", "video"),
    "llava_onevision": ("pictures", "video"),
    "minicpmv4_6": ("pictures",),
    "minicpmv4_7": ("pictures",),
    "mistral": ("text",),
    "mistral3": ("pictures",),
    "molmo2": ("pictures",),
    "nemotron_h": ("text",),
    "olmo_hybrid": ("text",),
    "ovis2": ("pictures",),
    "paligemma": ("pictures",),
    "phi4_multimodal": ("pictures",),
    "qwen2": ("text",),
    "qwen2_5_vl": ("pictures", "video"),
    "qwen2_vl": ("pictures", "video"),
    "qwen3": ("text",),
    "qwen3_5": ("pictures",),
    "qwen3_5_moe": ("pictures",),
    "qwen3_next": ("text",),
    "qwen3_vl": ("pictures",),
    "qwen3_vl_moe": ("pictures",),
    "smolvlm": ("pictures",),
}
LATENTS = (
    "the model expands latents of all tokens to K and V by itself at every step, and PyTorch "
    "operations dequantize them for it"
)
CAPPED = "scores are capped (attn_logit_softcapping), which no kernel does"
VISUAL_TOKEN_FIELDS = ("image_token_id", "video_token_id")


@dataclass(frozen=True)
class ModelFacts:
    """The shape of a model's cache and the ids of its visual tokens.

    shapes: of the layers whose K and V are packed; a spec counts these, and `sliding` is of these.
    states: numbers in the model of the layers that keep states of fixed size instead, of
        `state_kinds`. empty: of those that keep nothing, such as a layer of experts alone.
    readers: of those that keep nothing and attend to K and V of an earlier layer. If that one is
        packed, it is the last packed one.
    windows: of those with a sliding window or in chunks, which stay in 16 bit, where other layers
        see all tokens; window_shapes: theirs. window: how many tokens such layers see, packed or
        not. is_chunked: a query sees its own chunk of so many tokens alone.
    takes_pictures: a part of the model looks at pictures; without ids only the caller's
        `visual_mask` says where their tokens are. mask_input: the forward pass has this input,
        which says it, too.
    attends_across: layers attend to pictures, and all tokens are text. crosses: numbers of those
        that keep K and V of pictures, in 16 bit. softcap: the bound of scores, or None.
    spares_prompt: windows are over the answer alone, and all tokens see the prompt. is_indexed:
        an indexer chooses the tokens that queries see; `sliding` is of such layers, too.
    conv_states: how many states of convolutions a layer with states keeps.
    state_bytes: of all layers' states, for a sequence. picture_bytes: of a picture in all layers of
        `crosses`. None where the config does not say.
    """

    model_type: str
    shapes: tuple[LayerShape, ...]
    element_bytes: int
    sliding: tuple[bool, ...]
    visual_token_ids: tuple[int, ...]
    takes_pictures: bool = False
    states: tuple[int, ...] = ()
    state_kinds: tuple[str, ...] = ()
    empty: tuple[int, ...] = ()
    readers: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    window_shapes: tuple[LayerShape, ...] = ()
    window: int | None = None
    is_chunked: bool = False
    mask_input: str | None = None
    attends_across: bool = False
    crosses: tuple[int, ...] = ()
    softcap: float | None = None
    spares_prompt: bool = False
    is_indexed: bool = False
    conv_states: int = 1
    state_bytes: int | None = 0
    picture_bytes: int | None = 0

    @property
    def layers(self) -> int:
        """Count of the layers whose K and V are packed."""
        return len(self.shapes)

    @property
    def shape(self) -> LayerShape:
        """The shape of all packed layers. Errors: ValueError where they differ."""
        if len(set(self.shapes)) > 1 or self.has_latents:
            raise ValueError(
                "this needs layers with K and V of one shape; those of "
                f"{self.model_type!r} have {sorted(set(map(astuple, self.shapes)))} (q_heads, "
                "kv_heads, head_dim, latent_rope). Use a scheme and a command that take every "
                "layer by itself."
            )
        return self.shapes[0]

    @property
    def elements(self) -> int:
        """Numbers of K and V per token, over all packed layers."""
        return sum(shape.elements for shape in self.shapes)

    @property
    def own(self) -> tuple[int, ...]:
        """Numbers in the model of the layers that stay transformers' own."""
        return tuple(
            sorted((*self.states, *self.windows, *self.crosses, *self.empty, *self.readers))
        )

    @property
    def packed(self) -> tuple[int, ...]:
        """Numbers in the model of the layers whose K and V are packed."""
        own = self.own
        return tuple(n for n in range(self.layers + len(own)) if n not in own)

    @property
    def source(self) -> int | None:
        """The packed layer, as a spec counts, whose K and V later layers may read; None: nobody."""
        return self.layers - 1 if self.readers else None

    @property
    def has_windows(self) -> bool:
        """Some layers see only the latest tokens."""
        return any(self.sliding) or bool(self.windows)

    @property
    def has_latents(self) -> bool:
        """The cache holds latents, which the model expands to K and V of all tokens by itself."""
        return any(shape.latent_rope for shape in self.shapes)

    @property
    def against_kernels(self) -> str | None:
        """Why no kernel of ours can read this model's cache, or None."""
        return LATENTS if self.has_latents else CAPPED if self.softcap is not None else None

    @property
    def is_multimodal(self) -> bool:
        """Some tokens may be visual."""
        return self.takes_pictures or bool(self.visual_token_ids)

    def signature(self) -> dict[str, Any]:
        """Facts that a saved cache shares with the model that loads it."""
        sizes = {
            name: [getattr(shape, name) for shape in self.shapes]
            for name in ("kv_heads", "head_dim")
        }
        sizes = {name: x[0] if len(set(x)) == 1 else x for name, x in sizes.items()}
        return {"model_type": self.model_type, "layers": self.layers, **sizes}


def model_facts(
    model_or_config: PreTrainedModel | PreTrainedConfig, *, visual_mask: Tensor | None = None
) -> ModelFacts:
    """Read and check a model's config.

    visual_mask: what the caller says of visual tokens, if anything.
    Errors: ValueError naming what is unsupported, and for a model that takes pictures where
    neither its config nor a mask tells which tokens are theirs.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(
            f"expected a transformers model or its config; got a {type(config).__name__}. "
            "By name: duotone.loading.load_config(name)."
        )
    text = config.get_text_config(decoder=True)
    check_supported(config, text)
    if isinstance(model_or_config, PreTrainedModel):
        check_sinks(model_or_config)
    across = attends_across(config)
    ids = () if across else visual_token_ids(config)
    pictures = takes_pictures(model_or_config) and not across
    mask_input = None if ids else input_of_places(model_or_config)
    if pictures and not (ids or mask_input) and visual_mask is None:
        raise _unknown_places(config.model_type)
    if config.model_type not in TESTED_FAMILIES:
        logger.warning_once(
            f"duotone's tests do not cover model_type {config.model_type!r}; its config passes "
            "the structural checks. Compare with the 16-bit cache once (duotone compare)."
        )
    dtype = getattr(model_or_config, "dtype", None) or text.dtype
    kinds, configs = layer_kinds(text), layer_configs(text)
    states, windows = numbers_of(kinds, *STATE_TYPES), own_windows(text, kinds)
    packed, crosses = packed_layers(text, kinds), numbers_of(kinds, CROSS_TYPE)
    element_bytes = dtype.itemsize if dtype is not None else 2
    across_elements = sum(layer_shape(configs[n]).elements for n in crosses)
    return ModelFacts(
        model_type=config.model_type,
        shapes=tuple(layer_shape(configs[n]) for n in packed),
        element_bytes=element_bytes,
        sliding=tuple(kinds[n] in MASKED_TYPES for n in packed),
        is_indexed=INDEXED_TYPE in kinds,
        conv_states=getattr(text, "number_of_conv_states", 1),
        spares_prompt=ANSWER_TYPE in kinds,
        visual_token_ids=ids,
        takes_pictures=pictures,
        states=states,
        state_kinds=STATE_TYPES[kinds[states[0]]] if states else (),
        empty=numbers_of(kinds, *EMPTY_TYPES),
        readers=numbers_of(kinds, READER_TYPE),
        windows=windows,
        window_shapes=tuple(layer_shape(configs[n]) for n in windows),
        window=window_of(text, kinds),
        is_chunked=CHUNK_TYPE in kinds,
        mask_input=mask_input,
        attends_across=across,
        crosses=crosses,
        state_bytes=state_bytes(text, len(states), element_bytes),
        picture_bytes=picture_bytes(config, across_elements, element_bytes),
        softcap=getattr(text, "attn_logit_softcapping", None),
    )


def with_visual(facts: ModelFacts, visual_mask: Tensor | None) -> ModelFacts:
    """Facts of a model whose caller calls some tokens visual, though its config has no ids."""
    given = visual_mask is not None and bool(visual_mask.any())
    return replace(facts, takes_pictures=True) if given and not facts.attends_across else facts


def _unknown_places(name: str) -> ValueError:
    return ValueError(
        f"{name!r} takes pictures, but its config has none of {VISUAL_TOKEN_FIELDS}, so its "
        "visual tokens would pass for text. Set the field, or give "
        "visual_mask=[batch, tokens] to enable or QuantizedCache (all False: no pictures)."
    )


def visual_token_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Ids of the placeholders of visual tokens; () for a text-only model.

    They are in the config itself, or in that of the tower where the former has none.
    """
    return _ids_in(config) or _ids_in(getattr(config, "vision_config", None))


def _ids_in(config: object) -> tuple[int, ...]:
    ids = (getattr(config, field, None) for field in VISUAL_TOKEN_FIELDS)
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))
