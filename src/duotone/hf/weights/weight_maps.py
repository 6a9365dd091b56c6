"""Maps of modules to their parts, for the families whose weights can be transformed.

Data only: a family is a function from a loaded model to a `WeightMap` of paths. Families share
blocks, so that a new one is a few lines. What a path must be is documented in `weights.structure`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from duotone.weights.equivalences.module_map import Block, Reader, Stream, ValueHeads, WeightMap, at

LANGUAGE = "model.language_model"
PROJECTOR = "model.multi_modal_projector"


def weight_map(model: PreTrainedModel) -> WeightMap:
    """The map of `model`. Errors: ValueError for a family without one, and for a wrong path."""
    family = model.config.model_type
    if family not in FAMILIES:
        raise ValueError(
            f"the weights of {family!r} models cannot be transformed: no module map is known; "
            f"got {type(model).__name__}, known are {sorted(FAMILIES)}. Add one to "
            "duotone.hf.weights.weight_maps, or quantize the KV cache only."
        )
    made = FAMILIES[family](model)
    _check(model, made)
    return made


def _check(model: nn.Module, made: WeightMap) -> None:
    paths = [made.embedding, made.head]
    for stream in made.streams:
        for block in stream.blocks:
            paths += [block.values.linear, block.up]
            for branch in block.branches:
                paths += [branch.norm, *branch.inputs, branch.output]
                paths += [branch.output_norm, branch.scale]
        paths += [path for r in stream.readers for path in (r.norm, *r.linears)]
        paths += [*stream.writers, *stream.tables, *stream.vectors]
        paths += [stream.entry_norm, *stream.outside]
    for path in paths:
        if path is not None:
            at(model, path)


def _count(model: nn.Module, path: str) -> range:
    return range(len(at(model, path)))


def _decoder_block(layer: str, text: Any, fused_gate: bool = False) -> Block:
    """A Llama-like block: q, k, v, o; gate, up, down; RMSNorm before both."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    gates = ("gate_up_proj",) if fused_gate else ("gate_proj", "up_proj")
    return Block(
        attention_norm=f"{layer}.input_layernorm",
        attention_inputs=tuple(f"{layer}.self_attn.{n}_proj" for n in "qkv"),
        attention_output=f"{layer}.self_attn.o_proj",
        mlp_norm=f"{layer}.post_attention_layernorm",
        mlp_inputs=tuple(f"{layer}.mlp.{n}" for n in gates),
        mlp_output=f"{layer}.mlp.down_proj",
        values=ValueHeads(f"{layer}.self_attn.v_proj", text.num_key_value_heads, head_dim),
        up=f"{layer}.mlp.{gates[-1]}",
    )


DECODER_PARTS = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "gate_up", "down")),
)


def _check_decoder(model: nn.Module, layer: str, norms: tuple[str, ...]) -> None:
    """Refuse a layer with parameters that the map has no part for, such as further norms."""
    known = (*DECODER_PARTS, *norms)
    for path, module in at(model, layer).named_modules():
        own = next(module.parameters(recurse=False), None)
        mapped = any(path == part or path.startswith(f"{part}.") for part in known)
        if own is not None and not mapped:
            raise ValueError(
                f"the weights of {type(at(model, layer)).__name__} cannot be transformed: a layer "
                f"must have the parts {', '.join(known)}; got {layer}.{path} "
                f"({type(module).__name__}) besides. Quantize the KV cache only."
            )


def _language(
    model: PreTrainedModel,
    root: str = LANGUAGE,
    writers: tuple[str, ...] = (),
    vectors: tuple[str, ...] = (),
    norms: tuple[str, ...] = (),
) -> Stream:
    """The language model's stream; writers: the last linears of projectors and mergers.

    norms: of a layer, beside the two of a Llama-like block.
    """
    text = model.config.get_text_config(decoder=True)
    layers = [f"{root}.layers.{i}" for i in _count(model, f"{root}.layers")]
    for layer in layers:
        _check_decoder(model, layer, norms)
    return Stream(
        name="language",
        channels=text.hidden_size,
        blocks=tuple(_decoder_block(layer, text) for layer in layers),
        readers=(Reader(("lm_head",), f"{root}.norm"),),
        writers=writers,
        tables=(f"{root}.embed_tokens",),
        vectors=vectors,
    )


def _map(model: PreTrainedModel, *streams: Stream, root: str = LANGUAGE) -> WeightMap:
    return WeightMap(model.config.model_type, streams, f"{root}.embed_tokens", "lm_head")


def _text_only(model: PreTrainedModel) -> WeightMap:
    return _map(model, _language(model, root="model"), root="model")


def _clip_block(layer: str, vision: Any) -> Block:
    heads = vision.num_attention_heads
    return Block(
        attention_norm=f"{layer}.layer_norm1",
        attention_inputs=tuple(f"{layer}.self_attn.{n}_proj" for n in "qkv"),
        attention_output=f"{layer}.self_attn.out_proj",
        mlp_norm=f"{layer}.layer_norm2",
        mlp_inputs=(f"{layer}.mlp.fc1",),
        mlp_output=f"{layer}.mlp.fc2",
        values=ValueHeads(f"{layer}.self_attn.v_proj", heads, vision.hidden_size // heads),
    )


def _clip_tower(model: PreTrainedModel, reader: str) -> Stream:
    """CLIP's or SigLIP's vision tower; the projector reads the stream as it is.

    CLIP's ln_pre makes the stream, so that patches, class token and positions are before it.
    """
    tower, vision = "model.vision_tower", model.config.vision_config
    if hasattr(at(model, tower), "vision_model"):
        # Older transformers wrap the transformer once more.
        tower = f"{tower}.vision_model"
    layers = f"{tower}.encoder.layers"
    is_clip = hasattr(at(model, tower), "pre_layrnorm")
    patches, positions = (f"{tower}.embeddings.{n}_embedding" for n in ("patch", "position"))
    return Stream(
        name="vision",
        channels=vision.hidden_size,
        blocks=tuple(_clip_block(f"{layers}.{i}", vision) for i in _count(model, layers)),
        readers=(Reader((reader,)),),
        writers=() if is_clip else (patches,),
        tables=() if is_clip else (positions,),
        entry_norm=f"{tower}.pre_layrnorm" if is_clip else None,
        outside=(f"{tower}.post_layernorm",),
    )


def _llava(model: PreTrainedModel) -> WeightMap:
    """LLaVA, LLaVA-NeXT and LLaVA-OneVision: CLIP or SigLIP, an MLP, newline vectors."""
    newline = getattr(model.model, "image_newline", None)
    vectors = () if newline is None else ("model.image_newline",)
    language = _language(model, writers=(f"{PROJECTOR}.linear_2",), vectors=vectors)
    if model.config.vision_config.model_type not in ("clip_vision_model", "siglip_vision_model"):
        raise ValueError(
            "vision towers known under LLaVA are CLIP and SigLIP; got "
            f"{model.config.vision_config.model_type!r}."
        )
    return _map(model, _clip_tower(model, f"{PROJECTOR}.linear_1"), language)


def _internvl_block(layer: str, vision: Any) -> Block:
    heads = vision.num_attention_heads
    return Block(
        attention_norm=f"{layer}.layernorm_before",
        attention_inputs=tuple(f"{layer}.attention.{n}_proj" for n in "qkv"),
        attention_output=f"{layer}.attention.projection_layer",
        attention_scale=f"{layer}.lambda_1",
        mlp_norm=f"{layer}.layernorm_after",
        mlp_inputs=(f"{layer}.mlp.fc1",),
        mlp_output=f"{layer}.mlp.fc2",
        mlp_scale=f"{layer}.lambda_2",
        values=ValueHeads(f"{layer}.attention.v_proj", heads, vision.hidden_size // heads),
    )


def _internvl(model: PreTrainedModel) -> WeightMap:
    """InternVL: its ViT with LayerScale; the projector's norm spans the four shuffled tokens."""
    tower, vision = "model.vision_tower", model.config.vision_config
    if not isinstance(at(model, f"{tower}.layernorm"), nn.Identity):
        raise ValueError(
            "InternVL towers with a final norm (use_mean_pooling=False) are not in the map; "
            "no published checkpoint has one."
        )
    layers, embeddings = f"{tower}.encoder.layer", f"{tower}.embeddings"
    vectors = [f"{embeddings}.cls_token"]
    if at(model, f"{embeddings}.position_embeddings") is not None:
        vectors.append(f"{embeddings}.position_embeddings")
    stream = Stream(
        name="vision",
        channels=vision.hidden_size,
        blocks=tuple(_internvl_block(f"{layers}.{i}", vision) for i in _count(model, layers)),
        readers=(Reader((f"{PROJECTOR}.linear_1",), f"{PROJECTOR}.layer_norm"),),
        writers=(f"{embeddings}.patch_embeddings.projection",),
        vectors=tuple(vectors),
    )
    return _map(model, stream, _language(model, writers=(f"{PROJECTOR}.linear_2",)))


def _qwen_block(layer: str, channels: int, heads: int, mlp: tuple[str, ...], up: bool) -> Block:
    """A block of Qwen's towers: fused qkv, V last; mlp: its linears, the output last."""
    *inputs, output = (f"{layer}.mlp.{name}" for name in mlp)
    return Block(
        attention_norm=f"{layer}.norm1",
        attention_inputs=(f"{layer}.attn.qkv",),
        attention_output=f"{layer}.attn.proj",
        mlp_norm=f"{layer}.norm2",
        mlp_inputs=tuple(inputs),
        mlp_output=output,
        values=ValueHeads(f"{layer}.attn.qkv", heads, channels // heads, 2 * channels),
        up=inputs[-1] if up else None,
    )


def _qwen_tower(
    model: PreTrainedModel, channels: int, mlp: tuple[str, ...], **parts: Any
) -> Stream:
    root, heads = "model.visual", model.config.vision_config.num_heads
    layers = [f"{root}.blocks.{i}" for i in _count(model, f"{root}.blocks")]
    gated = len(mlp) == 3
    return Stream(
        name="vision",
        channels=channels,
        blocks=tuple(_qwen_block(layer, channels, heads, mlp, gated) for layer in layers),
        writers=(f"{root}.patch_embed.proj",),
        **parts,
    )


def _merger_map(model: PreTrainedModel, channels: int, mlp: tuple[str, ...]) -> WeightMap:
    """Qwen2-VL and Qwen2.5-VL: the merger normalises each token, then reads four."""
    merger = "model.visual.merger"
    readers = (Reader((f"{merger}.mlp.0",), f"{merger}.ln_q"),)
    vision = _qwen_tower(model, channels, mlp, readers=readers)
    return _map(model, vision, _language(model, writers=(f"{merger}.mlp.2",)))


def _qwen2_vl(model: PreTrainedModel) -> WeightMap:
    return _merger_map(model, model.config.vision_config.embed_dim, ("fc1", "fc2"))


def _qwen2_5_vl(model: PreTrainedModel) -> WeightMap:
    mlp = ("gate_proj", "up_proj", "down_proj")
    return _merger_map(model, model.config.vision_config.hidden_size, mlp)


def _qwen3_vl(model: PreTrainedModel) -> WeightMap:
    """Qwen3-VL: DeepStack mergers normalise four tokens at once and write into early layers."""
    root, channels = "model.visual", model.config.vision_config.hidden_size
    mergers = [f"{root}.merger"]
    mergers += [
        f"{root}.deepstack_merger_list.{i}" for i in _count(model, f"{root}.deepstack_merger_list")
    ]
    vision = _qwen_tower(
        model,
        channels,
        ("linear_fc1", "linear_fc2"),
        readers=tuple(Reader((f"{m}.linear_fc1",), f"{m}.norm") for m in mergers),
        tables=(f"{root}.pos_embed",),
    )
    writers = tuple(f"{m}.linear_fc2" for m in mergers)
    return _map(model, vision, _language(model, writers=writers))


def _glm4v(model: PreTrainedModel) -> WeightMap:
    """GLM-4.1V: an RMSNorm makes the tower's stream, positions join after it; sandwich decoder."""
    root, channels = "model.visual", model.config.vision_config.hidden_size
    vision = _qwen_tower(
        model,
        channels,
        ("gate_proj", "up_proj", "down_proj"),
        readers=(Reader((f"{root}.downsample",), f"{root}.post_layernorm"),),
        tables=(f"{root}.embeddings.position_embedding",),
        entry_norm=f"{root}.post_conv_layernorm",
    )
    return _map(model, replace(vision, writers=()), _glm_language(model))


def _glm_language(model: PreTrainedModel) -> Stream:
    text = model.config.get_text_config(decoder=True)
    layers = [f"{LANGUAGE}.layers.{i}" for i in _count(model, f"{LANGUAGE}.layers")]
    blocks = [
        replace(
            _decoder_block(layer, text, fused_gate=True),
            attention_output_norm=f"{layer}.post_self_attn_layernorm",
            mlp_output_norm=f"{layer}.post_mlp_layernorm",
        )
        for layer in layers
    ]
    norms = ("post_self_attn_layernorm", "post_mlp_layernorm")
    base = _language(model, writers=("model.visual.merger.down_proj",), norms=norms)
    return replace(base, blocks=tuple(blocks))


FAMILIES: dict[str, Callable[[PreTrainedModel], WeightMap]] = {
    "glm4v": _glm4v,
    "internvl": _internvl,
    "llama": _text_only,
    "llava": _llava,
    "llava_next": _llava,
    "llava_onevision": _llava,
    "mistral": _text_only,
    "qwen2": _text_only,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen3": _text_only,
    "qwen3_vl": _qwen3_vl,
}
