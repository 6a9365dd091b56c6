"""Tiny random-weight models of the real families, and real inputs for them (pixels included).

Each family is data: a config, the tokens that stand for one image, and the extra inputs that its
forward wants. Weights are drawn with a large spread, so that attention is peaky and generated
tokens depend on the images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

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
QWEN_VISION = dict(depth=1, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


@dataclass(frozen=True)
class Family:
    """name: transformers' model_type. image_tokens: visual tokens of one image."""

    name: str
    config: Callable[[], Any]
    image_tokens: int = 0
    pixels: Callable[[int], dict[str, Tensor]] = lambda images: {}
    video: Callable[[int], dict[str, Tensor]] | None = None
    video_tokens: int = 0
    extra: Callable[[Tensor], dict[str, Tensor]] = lambda ids: {}
    image_marks: tuple[list[int], list[int]] = field(default=([], []))

    @property
    def is_multimodal(self) -> bool:
        return self.image_tokens > 0


def _config(name: str, **fields: Any) -> Any:
    return getattr(transformers, name)(**fields)


def _text(name: str, **changes: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": name, **changes}


def _plain_pixels(size: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda images: {"pixel_values": torch.randn(images, 3, size, size)}


def _grid_pixels(images: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(images * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * images),
    }


def _grid_video(videos: int) -> dict[str, Tensor]:
    return {
        "pixel_values_videos": torch.randn(videos * 32, 3 * 2 * 4 * 4),
        "video_grid_thw": torch.tensor([[2, 4, 4]] * videos),
    }


def _modality(ids: Tensor) -> dict[str, Tensor]:
    return {"mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == VIDEO).long()}


def _qwen_vision(**changes: Any) -> dict[str, Any]:
    return {**QWEN_VISION, "in_channels": 3, "initializer_range": 0.3, **changes}


def _internvl() -> Any:
    vision = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=[16, 16],
        patch_size=[4, 4],
        initializer_range=0.3,
    )
    return _config(
        "InternVLConfig",
        vision_config=vision,
        text_config=_text("qwen2"),
        image_token_id=IMAGE,
        image_seq_length=4,
    )


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


def _llava() -> Any:
    return _config(
        "LlavaConfig",
        vision_config=_clip_vision(model_type="clip_vision_model"),
        text_config=_text("llama"),
        image_token_index=IMAGE,
        image_seq_length=16,
    )


def _llava_onevision() -> Any:
    return _config(
        "LlavaOnevisionConfig",
        vision_config=_clip_vision(model_type="siglip_vision_model"),
        text_config=_text("qwen2"),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[16, 16]],
        vision_feature_layer=-1,
    )


def _smolvlm() -> Any:
    return _config(
        "SmolVLMConfig",
        vision_config=_clip_vision(model_type="smolvlm_vision"),
        text_config=_text("llama"),
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=PAD,
    )


def _gemma3() -> Any:
    text = _text("gemma3_text", head_dim=16, sliding_window=24, query_pre_attn_scalar=16)
    text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    return _config(
        "Gemma3Config",
        vision_config=_clip_vision(model_type="siglip_vision_model", vision_use_head=False),
        text_config=text,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
        mm_tokens_per_image=4,
    )


def _qwen2_vl() -> Any:
    return _config(
        "Qwen2VLConfig",
        vision_config=_qwen_vision(embed_dim=32, hidden_size=64, mlp_ratio=2),
        text_config=_text("qwen2_vl_text", rope_parameters=MROPE),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )


def _qwen2_5_vl() -> Any:
    vision = _qwen_vision(
        hidden_size=32,
        out_hidden_size=64,
        intermediate_size=48,
        window_size=16,
        fullatt_block_indexes=[0],
    )
    return _config(
        "Qwen2_5_VLConfig",
        vision_config=vision,
        text_config=_text("qwen2_5_vl_text", rope_parameters=MROPE),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )


def _qwen3_vl() -> Any:
    vision = _qwen_vision(
        hidden_size=32,
        out_hidden_size=64,
        intermediate_size=48,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )
    return _config(
        "Qwen3VLConfig",
        vision_config=vision,
        text_config=_text("qwen3_vl_text", head_dim=16, rope_parameters=MROPE),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )


def _glm4v() -> Any:
    vision = _qwen_vision(
        hidden_size=32,
        out_hidden_size=64,
        intermediate_size=48,
        image_size=16,
    )
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


def _chameleon() -> Any:
    codes = {f"IMGIMG{chr(ord('A') + i)}Z": CODES + i for i in range(8)}
    vq = dict(
        num_embeddings=8,
        embed_dim=8,
        latent_channels=8,
        resolution=16,
        base_channels=32,
        channel_multiplier=[1, 1, 1],
        num_res_blocks=1,
    )
    return _config(
        "ChameleonConfig", **TEXT, vq_config=vq, vocabulary_map={"<image>": IMAGE, **codes}
    )


def _emu3() -> Any:
    codes = {f"<|visual token {i:06}|>": CODES + i for i in range(8)}
    vq = dict(
        codebook_size=8,
        base_channels=32,
        channel_multiplier=[1, 1, 1],
        num_res_blocks=1,
        attn_resolutions=[],
        hidden_size=32,
    )
    return _config(
        "Emu3Config",
        text_config=_text("emu3_text_model"),
        vq_config=vq,
        vocabulary_map={"<image>": IMAGE, "<|extra_200|>": CODES + 8, **codes},
    )


def _sized_pixels(images: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(images, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 16]] * images),
    }


def _text_only(config: str, **changes: Any) -> Callable[[], Any]:
    return lambda: _config(config, **{**TEXT, **changes})


def _gemma_types(ids: Tensor) -> dict[str, Tensor]:
    return {"token_type_ids": (ids == IMAGE).long()}


FAMILIES = {
    family.name: family
    for family in (
        Family("internvl", _internvl, 4, _plain_pixels(16)),
        Family("llava", _llava, 16, _plain_pixels(16)),
        Family(
            "llava_onevision",
            _llava_onevision,
            # 16 features, 16 more of the unpadded grid with a newline per row of four.
            36,
            lambda n: {
                "pixel_values": torch.randn(n, 2, 3, 16, 16),
                "image_sizes": torch.tensor([[16, 16]] * n),
            },
            video=lambda n: {"pixel_values_videos": torch.randn(n, 2, 3, 16, 16)},
            video_tokens=9,
        ),
        Family("smolvlm", _smolvlm, 4, lambda n: {"pixel_values": torch.randn(1, n, 3, 16, 16)}),
        Family("gemma3", _gemma3, 4, _plain_pixels(16), extra=_gemma_types),
        Family("qwen2_vl", _qwen2_vl, 4, _grid_pixels, _grid_video, 8, _modality),
        Family("qwen2_5_vl", _qwen2_5_vl, 4, _grid_pixels, _grid_video, 8, _modality),
        Family("qwen3_vl", _qwen3_vl, 4, _grid_pixels, None, 0, _modality),
        Family("glm4v", _glm4v, 4, _grid_pixels, None, 0, _modality),
        Family("chameleon", _chameleon, 16, _plain_pixels(16)),
        # Each row of four codes ends in a token of its own.
        Family("emu3", _emu3, 20, _sized_pixels),
        Family("llama", _text_only("LlamaConfig")),
        Family("mistral", _text_only("MistralConfig", sliding_window=None)),
        Family("qwen2", _text_only("Qwen2Config")),
        Family("qwen3", _text_only("Qwen3Config", head_dim=16)),
    )
}
MULTIMODAL = [name for name, family in FAMILIES.items() if family.is_multimodal]
TEXT_ONLY = [name for name in FAMILIES if name not in MULTIMODAL]


@cache
def tiny_model(name: str) -> PreTrainedModel:
    """The family's model, fp32, the same weights every time."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    auto = AutoModelForImageTextToText if family.is_multimodal else AutoModelForCausalLM
    model = auto.from_config(family.config()).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def prompt(family: Family, parts: list[int | str]) -> list[int]:
    """Token ids: an int is that many text tokens, "image" / "video" a whole one with its marks."""
    ids: list[int] = []
    for part in parts:
        if part == "image":
            ids += [START, *[IMAGE] * family.image_tokens, END]
        elif part == "video":
            ids += [START, *[VIDEO] * family.video_tokens, END]
        else:
            ids += torch.randint(2, 280, (part,)).tolist()
    return ids


def inputs(name: str, prompts: list[list[int | str]], seed: int = 1) -> dict[str, Tensor]:
    """A left-padded batch for `model.generate`, pixels included."""
    torch.manual_seed(seed)
    family = FAMILIES[name]
    rows = [prompt(family, parts) for parts in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    given = {"input_ids": ids, "attention_mask": mask, **family.extra(ids)}
    images = sum(parts.count("image") for parts in prompts)
    videos = sum(parts.count("video") for parts in prompts)
    if images:
        given |= family.pixels(images)
    if videos:
        given |= family.video(videos)
    return given


def logit_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the spread of the expected logits."""
    # Some models rule tokens out with the lowest number there is.
    possible = theirs > torch.finfo(theirs.dtype).min
    if not torch.equal(possible, ours > torch.finfo(ours.dtype).min):
        return float("inf")
    ours, theirs = ours[possible], theirs[possible]
    return float((ours - theirs).abs().max() / theirs.std())


LOGIT_TOLERANCE = 1e-4
