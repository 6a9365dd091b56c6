"""Configs of the real families, as small as they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers

VOCAB = 300
IMAGE, VIDEO, START, END, PAD = 290, 291, 292, 293, 0
CODES = 281  # the first of nine ids that stand for codes of a picture
TEXT = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    pad_token_id=PAD,
    bos_token_id=1,
    eos_token_id=None,
    initializer_range=0.12,
    tie_word_embeddings=False,
)
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS = dict(sliding_window=24, layer_types=[SLIDING, FULL, SLIDING])
QWEN_VISION = dict(depth=1, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
# Of later towers than Qwen2-VL's, and the ids of its text models.
LATER_VISION = dict(hidden_size=32, out_hidden_size=64, intermediate_size=48)
QWEN_IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO)
QWEN_IDS |= dict(vision_start_token_id=START, vision_end_token_id=END)
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


def _config(name: str, **fields: Any) -> Any:
    """A config, or a skipped test where transformers is older than the family."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**fields)


def _text(name: str, **changes: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": name, **changes}


def _qwen_vision(**changes: Any) -> dict[str, Any]:
    return {**QWEN_VISION, "in_channels": 3, "initializer_range": 0.3, **changes}


def _clip_vision(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        **changes,
    }


def internvl() -> Any:
    vision = _clip_vision(num_hidden_layers=1, image_size=[16, 16], patch_size=[4, 4])
    return _config(
        "InternVLConfig",
        vision_config={**vision, "initializer_range": 0.3},
        text_config=_text("qwen2"),
        image_token_id=IMAGE,
        image_seq_length=4,
    )


def llava() -> Any:
    return _config(
        "LlavaConfig",
        vision_config=_clip_vision(model_type="clip_vision_model"),
        text_config=_text("llama"),
        image_token_index=IMAGE,
        image_seq_length=16,
    )


def llava_onevision() -> Any:
    return _config(
        "LlavaOnevisionConfig",
        vision_config=_clip_vision(model_type="siglip_vision_model"),
        text_config=_text("qwen2"),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[16, 16]],
        vision_feature_layer=-1,
    )


def smolvlm() -> Any:
    return _config(
        "SmolVLMConfig",
        vision_config=_clip_vision(model_type="smolvlm_vision"),
        text_config=_text("llama"),
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=PAD,
    )


def gemma3() -> Any:
    text = _text("gemma3_text", head_dim=16, query_pre_attn_scalar=16, **WINDOWS)
    return _config(
        "Gemma3Config",
        vision_config=_clip_vision(model_type="siglip_vision_model", vision_use_head=False),
        text_config=text,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
        mm_tokens_per_image=4,
    )


CHUNK = "chunked_attention"


def llama4() -> Any:
    vision = dict(intermediate_size=128, num_hidden_layers=1, vision_output_dim=48)
    vision |= dict(projector_input_dim=48, projector_output_dim=48, initializer_range=0.3)
    text = dict(layer_types=[CHUNK, FULL, CHUNK], attention_chunk_size=24, head_dim=16)
    text |= dict(no_rope_layers=[1, 0, 1], moe_layers=[1], num_local_experts=2, floor_scale=16)
    return _config(
        "Llama4Config",
        vision_config=_clip_vision(**vision),
        text_config=_text("llama4_text", intermediate_size_mlp=96, **text),
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )


def _gemma4(*types: str, **changes: Any) -> Any:
    vision = dict(num_hidden_layers=1, num_key_value_heads=2, head_dim=16, pooling_kernel_size=2)
    vision |= dict(position_embedding_size=16, initializer_range=0.3)
    text = {"global_head_dim": 32, "head_dim": 16, "sliding_window": 24, **changes}
    text |= dict(num_hidden_layers=len(types), layer_types=list(types))
    ids = dict(image_token_id=IMAGE, boi_token_id=START, eoi_token_id=END, video_token_id=VIDEO)
    ids |= dict(audio_token_id=294, boa_token_id=295, eoa_token_index=296)
    return _config(
        "Gemma4Config",
        vision_config=_clip_vision(**vision),
        text_config=_text("gemma4_text", **text),
        audio_config=None,
        **ids,
    )


def gemma4() -> Any:
    """The shape of 31B: layers that see all tokens have other heads, and K and V of one matrix."""
    more = dict(attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0)
    more |= dict(use_bidirectional_attention="vision")
    return _gemma4(SLIDING, FULL, SLIDING, FULL, **more)


def gemma4_e2b() -> Any:
    """The shape of E2B: the last layers read K and V of earlier ones."""
    more = dict(num_kv_shared_layers=3, hidden_size_per_layer_input=8)
    more |= dict(vocab_size_per_layer_input=VOCAB, num_key_value_heads=1)
    return _gemma4(SLIDING, FULL, SLIDING, FULL, SLIDING, FULL, FULL, **more)


def gemma3n_text() -> Any:
    types = [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL]
    more = dict(num_hidden_layers=6, layer_types=types, num_kv_shared_layers=2, sliding_window=24)
    more |= dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, head_dim=16)
    more |= dict(laurel_rank=8, altup_num_inputs=2)
    return _config("Gemma3nTextConfig", **{**TEXT, **more})


def _qwen(name: str, vision: dict[str, Any], text: str, **changes: Any) -> Any:
    text_config = _text(text, rope_parameters=MROPE, **changes)
    return _config(name, vision_config=_qwen_vision(**vision), text_config=text_config, **QWEN_IDS)


def qwen2_vl() -> Any:
    vision = dict(embed_dim=32, hidden_size=64, mlp_ratio=2)
    return _qwen("Qwen2VLConfig", vision, "qwen2_vl_text")


def qwen2_5_vl() -> Any:
    vision = {**LATER_VISION, "window_size": 16, "fullatt_block_indexes": [0]}
    return _qwen("Qwen2_5_VLConfig", vision, "qwen2_5_vl_text")


def qwen3_vl() -> Any:
    vision = {**LATER_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return _qwen("Qwen3VLConfig", vision, "qwen3_vl_text", head_dim=16)


def qwen3_5(kind: str = "qwen3_5", config: str = "Qwen3_5Config", **more: Any) -> Any:
    vision = {**LATER_VISION, "num_position_embeddings": 16}
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4)
    linear |= dict(linear_key_head_dim=16, linear_value_head_dim=8)
    layers = dict(num_hidden_layers=5, layer_types=[*types, "linear_attention"], head_dim=16)
    rope = {**MROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True}
    text = _text(f"{kind}_text", rope_parameters=rope, **linear, **layers, **more)
    return _config(config, vision_config=_qwen_vision(**vision), text_config=text, **QWEN_IDS)


def qwen3_5_moe() -> Any:
    return qwen3_5("qwen3_5_moe", "Qwen3_5MoeConfig", **EXPERTS, **SHARED)


def glm4v() -> Any:
    vision = _qwen_vision(**LATER_VISION, image_size=16)
    text = _text("glm4v_text", rope_parameters={**MROPE, "partial_rotary_factor": 1.0})
    return _config(
        "Glm4vConfig",
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=START,
        image_end_token_id=END,
        video_start_token_id=START + 2,
        video_end_token_id=END + 2,
    )


LINEAR, CONV = "linear_attention", "conv"
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=2, head_dim=16)
DELTA |= dict(linear_key_head_dim=16, linear_value_head_dim=8)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SHARED = dict(shared_expert_intermediate_size=32)
OMITTED_HEAD_DIM = {name: value for name, value in DELTA.items() if name != "head_dim"}
NEMOTRON = dict(ssm_state_size=16, mamba_num_heads=4, mamba_head_dim=16, n_groups=2, chunk_size=8)
NEMOTRON |= dict(n_routed_experts=4, moe_intermediate_size=32, head_dim=16)


def _layers(*types: str) -> dict[str, Any]:
    return dict(num_hidden_layers=len(types), layer_types=list(types))


# By model type, the class of the config and its fields; all are text models.
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        {**DELTA, **EXPERTS, **SHARED, **_layers(LINEAR, FULL, LINEAR, FULL, LINEAR)},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", {**OMITTED_HEAD_DIM, **_layers(LINEAR, FULL, LINEAR)}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **NEMOTRON,
            "moe_shared_expert_intermediate_size": 32,
            **_layers(LINEAR, "moe", FULL, "mlp", LINEAR, FULL),
        },
    ),
    "lfm2": ("Lfm2Config", _layers(CONV, FULL, CONV, FULL)),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**EXPERTS, "num_dense_layers": 1, **_layers(CONV, FULL, CONV, FULL)},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            **_layers(LINEAR, FULL, LINEAR, FULL),
        },
    ),
    "bamba": ("BambaConfig", {**MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]}),
    "jamba": (
        "JambaConfig",
        dict(
            num_hidden_layers=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=4,
            mamba_d_state=8,
            mamba_dt_rank=8,
        ),
    ),
}


def lfm2_vl() -> Any:
    vision = _clip_vision(model_type="siglip2_vision_model", num_patches=16)
    return _config(
        "Lfm2VlConfig",
        vision_config=vision,
        text_config=_text("lfm2", **_layers(CONV, FULL, CONV, FULL)),
        image_token_id=IMAGE,
        projector_hidden_size=48,
    )


VQ = dict(base_channels=32, channel_multiplier=[1, 1, 1], num_res_blocks=1)


def chameleon() -> Any:
    codes = {f"IMGIMG{chr(ord('A') + i)}Z": CODES + i for i in range(8)}
    vq = {**VQ, "num_embeddings": 8, "embed_dim": 8, "latent_channels": 8, "resolution": 16}
    return _config(
        "ChameleonConfig", **TEXT, vq_config=vq, vocabulary_map={"<image>": IMAGE, **codes}
    )


def emu3() -> Any:
    codes = {f"<|visual token {i:06}|>": CODES + i for i in range(8)}
    return _config(
        "Emu3Config",
        text_config=_text("emu3_text_model"),
        vq_config={**VQ, "codebook_size": 8, "attn_resolutions": [], "hidden_size": 32},
        vocabulary_map={"<image>": IMAGE, "<|extra_200|>": CODES + 8, **codes},
    )


def text_only(config: str, **changes: Any) -> Callable[[], Any]:
    return lambda: _config(config, **{**TEXT, **changes})
