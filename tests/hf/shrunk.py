"""Tiny models of types that no test runs, from their own default configs.

Sizes are replaced by the names of their fields, the language model's apart from its towers'; what
a type has besides stays. Of layers the first ones of each kind stay.
"""

from __future__ import annotations

from typing import Any

import torch
from family_configs import END, IMAGE, MROPE, PAD, START, TEXT, VIDEO, gemma3n_text
from transformers import PreTrainedConfig, PreTrainedModel

from benchmarks.supports.table import HUNYUAN_ROPE, config_of, full_config
from duotone.hf.weights.checkpoint import model_class

AUDIO = 294
# Pixels of a picture's and of a patch's sides.
SIZE, PATCH = 32, 8
LAYERS = 4
# A list has an entry per layer.
BY_LAYER = ("layer_types", "mlp_layer_types", "layer_rope_theta", "layers_block_type")
EXPERTS = ("moe_num_experts", "num_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")
WIDTHS = ("moe_intermediate_size", "shared_intermediate_size", "share_expert_dim")
WIDTHS += ("moe_hidden_size", "moe_shared_expert_intermediate_size")
LANGUAGE: dict[str, Any] = {
    **TEXT,
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(CHOSEN, 2),
    **dict.fromkeys(WIDTHS, 32),
    "attention_heads": 4,
    "chunk_size": 8,
    "dense_intermediate_size": 96,
    "embed_dim": 64,
    "ffn_dim": 96,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "layers": LAYERS,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "mamba_head_dim": 16,
    "mamba_num_heads": 4,
    "n_group": 1,
    "n_groups": 2,
    "num_sliding_attention_heads": 4,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "query_pre_attn_scalar": 16,
    "rotary_dim": 8,
    "sliding_window": 24,
    "sliding_window_pattern": 2,
    "ssm_state_size": 16,
    "topk_group": 1,
    "v_head_dim": 16,
    "word_embed_proj_dim": 64,
}
TOWER: dict[str, Any] = {
    "attention_heads": 2,
    **dict.fromkeys(("hidden_size", "d_model", "output_channels", "base_channels"), 32),
    **dict.fromkeys(("intermediate_size", "mlp_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("out_hidden_size", "output_dim", "projection_dim"), 64),
    "fullatt_block_indexes": [0],
    "global_attn_indexes": [0],
    **dict.fromkeys(("num_position_embeddings", "num_embeddings", "num_pos_feats"), 16),
    **dict.fromkeys(("pos_emb_height", "pos_emb_width"), 4),
    "deepstack_visual_indexes": [0],
    "encoder_attention_heads": 2,
    "encoder_hidden_size": 32,
    "encoder_layers": 1,
    "image_size": SIZE,
    "image_token_embed_dim": 64,
    "initializer_range": 0.3,
    "insert_layer_id": 0,
    "latent_channels": 8,
    "max_position_embeddings": 64,
    "mlp_ratio": 2.0,
    "patch_dim": 192,
    "patch_embed_hidden_size": 192,
    "patch_size": PATCH,
    "video_patch_dim": 384,
    "window_size": 16,
}
WHOLE: dict[str, Any] = {
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index"), VIDEO),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), AUDIO),
    **dict.fromkeys(("projector_hidden_size", "alignment_intermediate_size"), 64),
    "insert_layer_id": 0,
    "latent_query_num": 4,
    "merged_hidden_size": 256,
    "mm_tokens_per_image": 4,
    "num_query_tokens": 4,
    "out_hidden_size": 128,
    "projector_patch_to_query_dict": {16: 4},
    "tie_word_embeddings": False,
    "vision_feature_layer": -1,
    "vision_hidden_size": 32,
}
MARKS = {"vision_start_token_id": START, "vision_end_token_id": END}
THREE_AXES = {"text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}}
# Latents are expanded to all heads.
ALL_HEADS = {"num_key_value_heads": 4, "first_k_dense_replace": 1}
# As wide as the encoder.
AS_WIDE = {"vision_config": {"sam_config": {"downsample_channels": [32, 32]}}}
PATCHES = {"patch_sizes": [16, 6], "hidden_sizes": [32, 32], "depths": [1, 1]}
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 24}
# Fields that default configs leave out, and those whose sizes depend on one another.
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm46v", "glm_ocr", "glmga", "paddleocr_vl"), THREE_AXES),
    # Its axes of height and width take turns.
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**MROPE, "mrope_section": [2, 2, 4]}}},
    "cosmos3_edge": THREE_AXES,
    "kimi_k25": {"text_config": {**ALL_HEADS, "head_dim": 8}, "projection_hidden_size": 32},
    "mistral4": ALL_HEADS,
    **dict.fromkeys(("deepseek_ocr2", "unlimited_ocr"), AS_WIDE),
    # Codes of pictures and of sound are ids; the codebook is as wide as the encoder.
    "apertus1p5": {
        "vision_config": {"codebook_size": 64},
        "audio_config": {"codebook_size": 64, "codebook_dim": 32},
        "image_token_offset": 100,
        "audio_token_offset": 164,
    },
    "gemma3n": {"text_config": gemma3n_text().to_dict()},
    "granite4_vision": {
        # A head of its Q-Former has 64 channels.
        "vision_config": {"hidden_size": 64},
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[-2, 1], [-1, 0]],
        "spatial_target_layers": [2, 3],
        "image_grid_pinpoints": [[SIZE, SIZE]],
    },
    "hunyuan_vl": {"text_config": {"rope_parameters": {**HUNYUAN_ROPE, "mrope_section": [2] * 4}}},
    "evolla": {"aligner_num_add_layers": 2, "resampler_depth": 1, "use_cache": True},
    "idefics": {"alpha_initializer": "ones", "vision_config": {"embed_dim": 32}},
    "instructblipvideo": {"video_token_index": IMAGE},
    "mllama": {
        "text_config": {"cross_attention_layers": [1, 3]},
        "vision_config": {
            "num_global_layers": 1,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
            "supported_aspect_ratios": [[1, 1]],
            "max_num_tiles": 1,
        },
    },
    "muse_spark": {"audio_config": {"num_hidden_layers": 2, **PATCHES}},
    "qwen2_5_omni_thinker": {**THREE_AXES, **MARKS},
    "qwen3_omni_moe_thinker": {**THREE_AXES, **MARKS},
    "qwen4_exp": {
        "text_config": {
            **THREE_AXES["text_config"],
            "indexer_n_heads": 2,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "hc_count": 2,
            "hc_lowrank": 8,
            "eos_token_id": 2,
            "ple_layer_ids": [1],
            "number_of_conv_states": 3,
            "ple_embed_dim": 64,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50,
            "split_ngram_parts": 1,
        }
    },
    "step3p7": {"text_config": {**WINDOWS, "mlp_layer_types": None}},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default config of a type, shrunk."""
    full = full_config(model_type).to_dict()
    fields = _smaller(full, WHOLE if "text_config" in full else LANGUAGE)
    fields = _merged(fields, OWN.get(model_type, {}))
    return config_of(model_type, {n: x for n, x in fields.items() if n != "model_type"})


def tiny_model_of(model_type: str) -> PreTrainedModel:
    """A model of the shrunk config, the same weights every time, none of which begins as zeros."""
    return new_model_of(tiny_config(model_type))


def new_model_of(config: Any) -> PreTrainedModel:
    """A model of a config, the same weights every time, none of which begins as zeros."""
    torch.manual_seed(0)
    model = model_class(config).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def _smaller(fields: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    kept = _kept_layers(fields) if sizes is LANGUAGE else range(2)
    small = {name: _field(name, x, sizes, kept) for name, x in fields.items()}
    if sizes is LANGUAGE and "num_hidden_layers" in small:
        small["num_hidden_layers"] = len(kept)
    return {name: x for name, x in small.items() if name != "per_layer_config"}


def _field(name: str, x: Any, sizes: dict[str, Any], kept: Any) -> Any:
    if isinstance(x, dict) and "model_type" in x:
        return _smaller(x, LANGUAGE if name == "text_config" else TOWER)
    if name in BY_LAYER and isinstance(x, list):
        return [x[number] for number in kept]
    if name == "eos_token_id" or (name in sizes and x is None):
        return None
    if isinstance(x, list) and not isinstance(sizes.get(name, []), list):
        return [sizes[name]] * len(x)
    return sizes.get(name, x)


def _kept_layers(text: dict[str, Any]) -> list[int]:
    """Numbers of the first layers of each kind, `LAYERS` together where the kinds allow it."""
    lists = [x for name, x in text.items() if name in BY_LAYER and isinstance(x, list)]
    count = text.get("num_hidden_layers") or text.get("layers") or len(lists[0])
    of_kind: dict[tuple[str, ...], list[int]] = {}
    for number in range(count):
        of_kind.setdefault(tuple(str(x[number]) for x in lists), []).append(number)
    each = max(1, LAYERS // len(of_kind))
    return sorted(number for numbers in of_kind.values() for number in numbers[:each])


def _merged(fields: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    nested = {n: _merged(fields[n], x) for n, x in more.items() if isinstance(fields.get(n), dict)}
    return {**fields, **more, **nested}
