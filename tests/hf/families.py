"""Tiny random-weight models of the real families, and real inputs for them (pixels included).

Each family is data: a config, the tokens that stand for one image, and the extra inputs that its
forward wants. Weights are drawn with a large spread, so that attention is peaky and generated
tokens depend on the images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import family_configs as configs
import more_configs as more
import pytest
import torch
from family_configs import END, IMAGE, PAD, START, VIDEO
from torch import Tensor
from transformers import PreTrainedModel

from duotone.hf.verdict import refusal
from duotone.hf.versions import check_release
from duotone.hf.weights.checkpoint import model_class


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

    @property
    def is_multimodal(self) -> bool:
        return self.image_tokens > 0


def _plain_pixels(size: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda images: {"pixel_values": torch.randn(images, 3, size, size)}


def grid_pixels(images: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(images * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * images),
    }


def _grid_video(videos: int) -> dict[str, Tensor]:
    return {
        "pixel_values_videos": torch.randn(videos * 32, 3 * 2 * 4 * 4),
        "video_grid_thw": torch.tensor([[2, 4, 4]] * videos),
    }


def _patches(images: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(images, 16, 3 * 4 * 4),
        "pixel_attention_mask": torch.ones(images, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * images),
    }


def _placed_patches(images: int) -> dict[str, Tensor]:
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
    return {
        "pixel_values": torch.rand(images, 16, 3 * 4 * 4),
        "image_position_ids": places.expand(images, -1, -1).contiguous(),
    }


def _modality(ids: Tensor) -> dict[str, Tensor]:
    return {"mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == VIDEO).long()}


def _sized_pixels(images: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(images, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 16]] * images),
    }


def _listed_pixels(images: int) -> dict[str, Tensor]:
    """All pictures in the first row, as processors of Idefics lay them out."""
    return {"pixel_values": torch.randn(1, images, 3, 16, 16)}


def _one_tile(images: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(images, 2, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 16]] * images),
    }


def _pooled_patches(images: int) -> dict[str, Tensor]:
    """Crops of 16 patches, four to a token: [crops, patches, 3 * 4 * 4]."""
    return {
        "pixel_values": torch.randn(images, 16, 3 * 4 * 4),
        "image_token_pooling": torch.arange(images * 16).view(-1, 4),
        "image_grids": torch.tensor([[2, 2, 0, 0]] * images),
        "image_num_crops": torch.ones(images, dtype=torch.long),
    }


def _strip(images: int) -> dict[str, Tensor]:
    """Patches of all pictures in a row, 64 of each: [1, 3, 4, 4 * patches]."""
    return {
        "pixel_values": torch.randn(1, 3, 4, images * 64 * 4),
        "target_sizes": torch.tensor([[8, 8]] * images, dtype=torch.int32),
    }


def _two_crops(images: int) -> dict[str, Tensor]:
    """The whole picture and its only crop, of 16 patches each."""
    return {
        "image_pixel_values": torch.randn(images, 2, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 16]] * images),
        "image_attention_mask": torch.ones(images, 2, 4, 4, dtype=torch.long),
    }


def _gemma_types(ids: Tensor) -> dict[str, Tensor]:
    return {"token_type_ids": (ids == IMAGE).long()}


# Of all but the first, tests are in the slow tier (tests/tiers.py).
MORE = (
    Family("mistral3", more.mistral3, 4, _sized_pixels),
    Family("qwen3_vl_moe", more.qwen3_vl_moe, 4, grid_pixels, None, 0, _modality),
    Family("glm4v_moe", more.glm4v_moe, 4, grid_pixels, None, 0, _modality),
    Family("idefics3", more.idefics3, 4, _listed_pixels),
    # 15 or 16 features, 16 more of the tile with a newline per row of four.
    Family("llava_next", more.llava_next, 36, _one_tile),
    Family(
        "llava_next_video",
        more.llava_next_video,
        36,
        _one_tile,
        video=lambda n: {"pixel_values_videos": torch.randn(n, 2, 3, 16, 16)},
        video_tokens=8,
    ),
    Family("ovis2", more.ovis2, 4, _plain_pixels(16)),
    Family("molmo2", more.molmo2, 4, _pooled_patches, extra=_modality),
    Family("paligemma", more.paligemma, 16, _plain_pixels(16), extra=_gemma_types),
    Family("aya_vision", more.aya_vision, 4, _plain_pixels(16)),
    Family("idefics2", more.idefics2, 4, _listed_pixels),
    Family("lighton_ocr", more.lighton_ocr, 4, _sized_pixels),
    # 4 features with a newline per row of two, twice, and one between.
    Family("phi4_multimodal", more.phi4_multimodal, 13, _two_crops),
)
FAMILIES = {
    family.name: family
    for family in (
        Family("internvl", configs.internvl, 4, _plain_pixels(16)),
        Family("llava", configs.llava, 16, _plain_pixels(16)),
        Family(
            "llava_onevision",
            configs.llava_onevision,
            # 16 features, 16 more of the unpadded grid with a newline per row of four.
            36,
            lambda n: {
                "pixel_values": torch.randn(n, 2, 3, 16, 16),
                "image_sizes": torch.tensor([[16, 16]] * n),
            },
            video=lambda n: {"pixel_values_videos": torch.randn(n, 2, 3, 16, 16)},
            video_tokens=9,
        ),
        Family(
            "smolvlm", configs.smolvlm, 4, lambda n: {"pixel_values": torch.randn(1, n, 3, 16, 16)}
        ),
        Family("gemma3", configs.gemma3, 4, _plain_pixels(16), extra=_gemma_types),
        Family("qwen2_vl", configs.qwen2_vl, 4, grid_pixels, _grid_video, 8, _modality),
        Family("qwen2_5_vl", configs.qwen2_5_vl, 4, grid_pixels, _grid_video, 8, _modality),
        Family("qwen3_vl", configs.qwen3_vl, 4, grid_pixels, None, 0, _modality),
        Family("glm4v", configs.glm4v, 4, grid_pixels, None, 0, _modality),
        Family("chameleon", configs.chameleon, 16, _plain_pixels(16)),
        # Each row of four codes ends in a token of its own.
        Family("emu3", configs.emu3, 20, _sized_pixels),
        Family("llama", configs.text_only("LlamaConfig")),
        Family("mistral", configs.text_only("MistralConfig", sliding_window=None)),
        Family("qwen2", configs.text_only("Qwen2Config")),
        Family("qwen3", configs.text_only("Qwen3Config", head_dim=16)),
        *MORE,
    )
}
# Some of their layers stay transformers' own; `test_own_layers` and `test_own_windows` are theirs.
HYBRIDS = {
    "qwen3_5": Family("qwen3_5", configs.qwen3_5, 4, grid_pixels, None, 0, _modality),
    "qwen3_5_moe": Family("qwen3_5_moe", configs.qwen3_5_moe, 4, grid_pixels, None, 0, _modality),
    "minicpmv4_6": Family("minicpmv4_6", more.minicpmv4_6, 4, _strip),
    "minicpmv4_7": Family("minicpmv4_7", more.minicpmv4_7, 4, _strip, extra=_modality),
    "lfm2_vl": Family("lfm2_vl", configs.lfm2_vl, 4, _patches),
    **{
        name: Family(name, configs.text_only(config, **fields))
        for name, (config, fields) in configs.STATEFUL.items()
    },
    "llama4": Family("llama4", configs.llama4, 4, _plain_pixels(16)),
    **{
        name: Family("gemma4", getattr(configs, name), 4, _placed_patches, None, 0, _modality)
        for name in ("gemma4", "gemma4_e2b")
    },
    "gemma3n_text": Family("gemma3n_text", configs.gemma3n_text),
    "paligemma2": Family("paligemma", more.paligemma2, 16, _plain_pixels(16), extra=_gemma_types),
    "cohere2": Family("cohere2", configs.text_only("Cohere2Config", **configs.WINDOWS)),
}
MULTIMODAL = [name for name, family in FAMILIES.items() if family.is_multimodal]
TEXT_ONLY = [name for name in FAMILIES if name not in MULTIMODAL]


def random_model(family: Family) -> PreTrainedModel:
    """A model of the family's config as transformers makes it."""
    config = family.config()
    return model_class(config).from_config(config).eval()


def skip_broken(family: Family) -> None:
    """Skip a test of a type that the installed transformers cannot run, whatever its cache."""
    if (why := refusal(check_release, family.name)) is not None:
        pytest.skip(why)


def config_of(name: str) -> Any:
    """The family's config; skips as `new_model`."""
    family = {**FAMILIES, **HYBRIDS}[name]
    skip_broken(family)
    return family.config()


def new_model(name: str) -> PreTrainedModel:
    """The family's model, fp32, the same weights every time.

    A copy of one that has been compiled would not do: it keeps the first one's compiled forward.
    Skips a test of one that the installed transformers cannot run at all.
    """
    family = {**FAMILIES, **HYBRIDS}[name]
    skip_broken(family)
    torch.manual_seed(0)
    model = random_model(family)
    if name == "paligemma2":
        # sdpa, which transformers 5.17 takes, leaves out the cap of scores.
        model.set_attn_implementation({"text_config": "eager"})
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


@cache
def tiny_model(name: str) -> PreTrainedModel:
    """The family's model, one object for all tests that leave it as it is."""
    return new_model(name)


def new_exact_model(name: str) -> PreTrainedModel:
    """The family's model in float64: no last digit of a sum decides a code (`exactly`)."""
    model = new_model(name).double()
    # The default product of experts takes no float64.
    model.set_experts_implementation("batched_mm")
    return model


@cache
def exact_model(name: str) -> PreTrainedModel:
    """The family's model in float64, one object for all tests that leave it as it is."""
    return new_exact_model(name)


def typed(model: PreTrainedModel, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pixels in the model's type."""
    return {n: x.to(model.dtype) if x.is_floating_point() else x for n, x in given.items()}


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
    family = {**FAMILIES, **HYBRIDS}[name]
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
