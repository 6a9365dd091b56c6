"""Pictures for the tiny models of `shrunk`, by type: one per row of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from family_configs import END, IMAGE, PAD, START
from shrunk import PATCH, SIZE
from torch import Tensor
from transformers import PreTrainedModel

SIDE = SIZE // PATCH
PATCHES = SIDE**2
Pixels = Callable[[int], dict[str, Tensor]]


def _whole(images: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(images, 3, SIZE, SIZE)}


def _grid(frames: int) -> Pixels:
    """Flat patches of so many frames each: [patches, 3 * frames * patch * patch]."""
    return lambda images: {
        "pixel_values": torch.randn(images * PATCHES, 3 * frames * PATCH**2),
        "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * images),
    }


def _square_patches(images: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(images * PATCHES, 3, PATCH, PATCH),
        "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * images),
    }


def _questioned(*frames: int) -> Pixels:
    """Pictures, or videos of so many frames, with what a Q-Former is asked about them."""
    return lambda images: {
        "pixel_values": torch.randn(images, *frames, 3, SIZE, SIZE),
        "qformer_input_ids": torch.tensor([[5, 6, 7]] * images),
    }


def _flat_patches(images: int) -> dict[str, Tensor]:
    """Row and column of each patch, and its pixels."""
    places = 1 + torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
    pixels = torch.randn(images, PATCHES, 3 * PATCH**2)
    return {"flattened_patches": torch.cat((places.expand(images, -1, -1), pixels), -1)}


PIXELS: dict[str, Pixels] = {
    **dict.fromkeys(("blip-2", "kosmos-2"), _whole),
    "instructblip": _questioned(),
    "instructblipvideo": _questioned(2),
    "kosmos-2.5": _flat_patches,
    "idefics": lambda n: {"pixel_values": torch.randn(n, 1, 3, SIZE, SIZE)},
    "mllama": lambda n: {
        "pixel_values": torch.randn(n, 1, 1, 3, SIZE, SIZE),
        "aspect_ratio_ids": torch.ones(n, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(n, 1, 1, dtype=torch.long),
    },
    "evolla": lambda n: {
        "protein_input_ids": torch.randint(5, 250, (n, 12)),
        "protein_attention_mask": torch.ones(n, 12, dtype=torch.long),
    },
    **dict.fromkeys(("cohere2_vision", "deepseek_vl", "got_ocr2", "pp_chart2table"), _whole),
    **dict.fromkeys(("janus", "qianfan_ocr", "shieldgemma2", "step3p7", "vipllava"), _whole),
    **dict.fromkeys(("cosmos3_edge", "ernie4_5_vl_moe"), _grid(1)),
    **dict.fromkeys(("cosmos3_omni", "exaone4_5", "glm46v", "glm_ocr", "glmga"), _grid(2)),
    **dict.fromkeys(("cohere_compass", "hyperclovax_vision_v2", "lfm3_vl"), _grid(2)),
    "qwen4_exp": _grid(2),
    **dict.fromkeys(("hunyuan_vl",), _grid(1)),
    "deepseek_ocr2": _whole,
    "unlimited_ocr": _whole,
    "apertus1p5": lambda n: {**_whole(n), "image_sizes": torch.tensor([[SIZE, SIZE]] * n)},
    "granite4_vision": lambda n: {
        "pixel_values": torch.randn(n, 2, 3, SIZE, SIZE),
        "image_sizes": torch.tensor([[SIZE, SIZE]] * n),
    },
    **dict.fromkeys(("muse_glimmer", "muse_spark"), _grid(2)),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _grid(2)),
    "aria": lambda n: {**_whole(n), "pixel_mask": torch.ones(n, SIZE, SIZE, dtype=torch.long)},
    "deepseek_vl_hybrid": lambda n: {
        **_whole(n),
        "high_res_pixel_values": torch.randn(n, 3, SIZE, SIZE),
    },
    "granite_docling": lambda n: {
        "pixel_values": torch.randn(n, 1, 3, SIZE, SIZE),
        "pixel_attention_mask": torch.ones(n, 1, dtype=torch.bool),
    },
    "minicpm_ocr": lambda n: {
        "pixel_values": torch.randn(1, 3, PATCH, n * 64 * PATCH),
        "target_sizes": torch.tensor([[8, 8]] * n, dtype=torch.int32),
    },
    "nemotron_h_omni": lambda n: {
        "pixel_values": torch.randn(n * PATCHES, 3 * PATCH**2),
        "image_grid_hw": torch.tensor([[SIDE, SIDE]] * n),
    },
    **dict.fromkeys(("kimi_k25", "paddleocr_vl"), _square_patches),
    "video_llama_3": lambda n: {**_grid(1)(n), "image_merge_sizes": torch.tensor([1] * n)},
    "video_llava": lambda n: {"pixel_values_images": torch.randn(n, 3, SIZE, SIZE)},
}


# Their `generate` encodes pictures whatever it is asked.
ALWAYS = ("blip-2", "instructblip", "instructblipvideo", "kosmos-2", "kosmos-2.5", "idefics")


def with_picture(model: PreTrainedModel, more: int = 0) -> dict[str, Tensor]:
    """Two rows with a picture, one of them padded on the left; `more` text tokens at their ends."""
    pixels = PIXELS[model.config.model_type]
    picture = [START, *[IMAGE] * tokens_of(model, pixels(1)), END]
    ids = torch.tensor(
        [[5, 6, 7, *picture, *range(20, 29)], [PAD] * 5 + [9, *picture, *range(30, 36)]]
    )
    ids = torch.cat((ids, torch.randint(2, 280, (2, more))), 1)
    taken = inspect.signature(model.forward).parameters
    types = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
    types += ("image_embeds_position_mask",)
    visual = {name: (ids == IMAGE).long() for name in types if name in taken}
    # Tokens after a picture see it, and no others.
    sees = (ids == IMAGE).long().cumsum(1)[..., None].clamp_max(1)
    if model.config.model_type == "idefics":
        visual["image_attention_mask"] = sees
    if model.config.model_type == "mllama":
        visual["cross_attention_mask"] = sees[..., None]
    # With proteins and padding Evolla fails, with its own cache, too.
    real = ids != PAD if model.config.model_type != "evolla" else ids >= 0
    return {"input_ids": ids, "attention_mask": real.long(), **pixels(2), **visual}


def tokens_of(model: PreTrainedModel, pixels: dict[str, Tensor]) -> int:
    """Visual tokens of a picture."""
    if model.config.model_type in ("evolla", "idefics", "mllama"):  # beside the tokens
        return 1
    if hasattr(model.config, "latent_query_num"):
        return model.config.latent_query_num
    owner: Any = model if hasattr(model, "get_image_features") else getattr(model, "model", model)
    features_of = getattr(owner, "get_image_features", None) or owner.get_video_features
    with torch.no_grad():
        features = features_of(**pixels)
    pooled = getattr(features, "pooler_output", features)
    # Features of layers of its tower, each for a layer of the language model, alone.
    features = features.deepstack_features[0][1] if pooled is None else pooled
    each = features if isinstance(features, list | tuple) else [features]
    return sum(x.numel() // x.shape[-1] for x in each)
