"""Configs of more image-text families, as small as they go."""

from __future__ import annotations

from typing import Any

from family_configs import (
    CODES,
    END,
    EXPERTS,
    IMAGE,
    LATER_VISION,
    MROPE,
    START,
    TEXT,
    VIDEO,
    VOCAB,
    WINDOWS,
    _clip_vision,
    _config,
    _qwen,
    _qwen_vision,
    _text,
    qwen3_5,
)

SPREAD = dict(initializer_range=0.3)


def qwen3_vl_moe() -> Any:
    vision = {**LATER_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return _qwen("Qwen3VLMoeConfig", vision, "qwen3_vl_moe_text", head_dim=16, **EXPERTS)


def glm4v_moe() -> Any:
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    rope = {**MROPE, "partial_rotary_factor": 1.0}
    return _config(
        "Glm4vMoeConfig",
        vision_config=_qwen_vision(**LATER_VISION, image_size=16),
        text_config=_text("glm4v_moe_text", rope_parameters=rope, head_dim=16, **experts),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=START,
        image_end_token_id=END,
        video_start_token_id=START + 2,
        video_end_token_id=END + 2,
    )


def _pixtral() -> dict[str, Any]:
    return _clip_vision(model_type="pixtral", head_dim=16, num_hidden_layers=1, **SPREAD)


def mistral3() -> Any:
    return _config(
        "Mistral3Config",
        vision_config=_pixtral(),
        text_config=_text("mistral", head_dim=16, sliding_window=None),
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    )


def lighton_ocr() -> Any:
    return _config(
        "LightOnOcrConfig",
        vision_config=_pixtral(),
        text_config=_text("qwen3", head_dim=16),
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )


def idefics3() -> Any:
    return _config(
        "Idefics3Config",
        vision_config=_clip_vision(model_type="idefics3_vision"),
        text_config=_text("llama"),
        image_token_id=IMAGE,
    )


def idefics2() -> Any:
    perceiver = dict(hidden_size=64, resampler_n_latents=4, resampler_depth=1)
    perceiver |= dict(resampler_n_heads=4, resampler_head_dim=16, num_key_value_heads=2, **SPREAD)
    return _config(
        "Idefics2Config",
        vision_config=_clip_vision(**SPREAD),
        perceiver_config=perceiver,
        text_config=_text("mistral", sliding_window=None),
        image_token_id=IMAGE,
    )


def _llava(name: str, **more: Any) -> Any:
    return _config(
        name,
        vision_config=_clip_vision(model_type="clip_vision_model"),
        text_config=_text("llama"),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[16, 16]],
        **more,
    )


def llava_next() -> Any:
    return _llava("LlavaNextConfig")


def llava_next_video() -> Any:
    return _llava("LlavaNextVideoConfig", video_token_index=VIDEO)


def ovis2() -> Any:
    vision = _clip_vision(vocab_size=32, hidden_stride=2, **SPREAD)
    return _config(
        "Ovis2Config",
        vision_config=vision,
        text_config=_text("qwen2"),
        image_token_id=IMAGE,
        visual_indicator_token_ids=[START, END, *range(294, 297)],
        vocab_size=VOCAB,
        hidden_size=64,
        tie_word_embeddings=False,
    )


def molmo2() -> Any:
    heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    return _config(
        "Molmo2Config",
        vision_config={**_clip_vision(image_size=[16, 16]), **heads, **SPREAD},
        adapter_config={
            **heads,
            **SPREAD,
            "hidden_size": 32,
            "intermediate_size": 48,
            "text_hidden_size": 64,
            "vision_feature_layer": [1, 0],
        },
        text_config=_text("molmo2_text", vocab_size=CODES, additional_vocab_size=16, head_dim=16),
        image_patch_id=IMAGE,
        image_start_token_id=START,
        image_end_token_id=END,
    )


def paligemma(language: str = "gemma", **text: Any) -> Any:
    vision = dict(model_type="siglip_vision_model", vision_use_head=False, **SPREAD)
    return _config(
        "PaliGemmaConfig",
        vision_config=_clip_vision(**vision),
        text_config=_text(language, head_dim=16, **text),
        image_token_index=IMAGE,
        vocab_size=VOCAB,
        projection_dim=64,
        hidden_size=64,
        tie_word_embeddings=False,
    )


def paligemma2() -> Any:
    """Windows, and scores that reach their cap."""
    return paligemma("gemma2", attn_logit_softcapping=2.0, query_pre_attn_scalar=16, **WINDOWS)


def aya_vision() -> Any:
    vision = _clip_vision(model_type="siglip_vision_model", vision_use_head=False)
    return _config(
        "AyaVisionConfig",
        vision_config=vision,
        text_config=_text("cohere2", **WINDOWS),
        image_token_index=IMAGE,
    )


def _minicpm(name: str, **ids: int) -> Any:
    """The text model of Qwen3.5 after a tower of their own."""
    return _config(
        name,
        vision_config=_clip_vision(),
        text_config=qwen3_5().text_config.to_dict(),
        insert_layer_id=0,
        image_size=16,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **ids,
    )


def minicpmv4_6() -> Any:
    return _minicpm("MiniCPMV4_6Config")


def minicpmv4_7() -> Any:
    marks = dict(image_start_id=START, image_end_id=END)
    marks |= dict(slice_start_id=294, slice_end_id=295, newline_id=296)
    return _minicpm("MiniCPMV4_7Config", **marks)


def phi4_multimodal() -> Any:
    audio = dict(hidden_size=32, intermediate_size=32, num_blocks=1, num_attention_heads=2)
    audio |= dict(ext_pw_out_channel=32, depthwise_separable_out_channel=32, input_size=16)
    audio |= dict(nemo_conv_channels=16, audio_token_id=294)
    vision = _clip_vision(num_hidden_layers=3, image_token_id=IMAGE, crop_size=16)
    fields = {**TEXT, "eos_token_id": END, "original_max_position_embeddings": 1024}
    return _config("Phi4MultimodalConfig", **fields, vision_config=vision, audio_config=audio)
