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


PIXELS: dict[str, Pixels] = {
    **dict.fromkeys(("cohere2_vision", "deepseek_vl", "got_ocr2", "pp_chart2table"), _whole),
    **dict.fromkeys(("janus", "qianfan_ocr", "shieldgemma2", "step3p7", "vipllava"), _whole),
    **dict.fromkeys(("cosmos3_edge", "ernie4_5_vl_moe"), _grid(1)),
    **dict.fromkeys(("cosmos3_omni", "exaone4_5", "glm46v", "glm_ocr", "glmga"), _grid(2)),
    **dict.fromkeys(("cohere_compass", "hyperclovax_vision_v2", "lfm3_vl"), _grid(2)),
    **dict.fromkeys(("hunyuan_vl",), _grid(1)),
    "deepseek_ocr2": _whole,
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
    "paddleocr_vl": lambda n: {
        "pixel_values": torch.randn(n * PATCHES, 3, PATCH, PATCH),
        "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * n),
    },
    "video_llama_3": lambda n: {**_grid(1)(n), "image_merge_sizes": torch.tensor([1] * n)},
    "video_llava": lambda n: {"pixel_values_images": torch.randn(n, 3, SIZE, SIZE)},
}


def with_picture(model: PreTrainedModel) -> dict[str, Tensor]:
    """Two rows with a picture, one of them padded on the left."""
    pixels = PIXELS[model.config.model_type]
    picture = [START, *[IMAGE] * tokens_of(model, pixels(1)), END]
    ids = torch.tensor(
        [[5, 6, 7, *picture, *range(20, 29)], [PAD] * 5 + [9, *picture, *range(30, 36)]]
    )
    taken = inspect.signature(model.forward).parameters
    types = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
    visual = {name: (ids == IMAGE).long() for name in types if name in taken}
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), **pixels(2), **visual}


def tokens_of(model: PreTrainedModel, pixels: dict[str, Tensor]) -> int:
    """Visual tokens of a picture."""
    owner: Any = model if hasattr(model, "get_image_features") else model.model
    with torch.no_grad():
        features = owner.get_image_features(**pixels)
    pooled = getattr(features, "pooler_output", features)
    # Features of layers of its tower, each for a layer of the language model, alone.
    features = features.deepstack_features[0][1] if pooled is None else pooled
    each = features if isinstance(features, list | tuple) else [features]
    return sum(x.numel() // x.shape[-1] for x in each)
