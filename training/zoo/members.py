"""The zoo's models: configs of real families, shapes of their batches, their inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from .batches import FRAMES, Batch, Shape
from .glyphs import CELL
from .vocabulary import BOS, EOS, ID, IMAGE, PAD, VIDEO, VOCABULARY

PATCH = 8
PATCHED = ("qwen", "glm4v")  # beginnings of model types that read pictures in patches, as Qwen
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": True,
}
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": ID["<vision>"],
    "vision_end_token_id": ID["</vision>"],
    "tie_word_embeddings": True,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}


def tower(side: int, width: int, patch: int, **changes: Any) -> dict[str, Any]:
    """Return CLIP's or SigLIP's fields; side: cells of 16 pixels."""
    return dict(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        image_size=side * CELL,
        patch_size=patch,
        **changes,
    )


def qwen_tower(**changes: Any) -> dict[str, Any]:
    return dict(
        depth=4,
        num_heads=3,
        patch_size=PATCH,
        spatial_merge_size=2,
        temporal_patch_size=2,
        in_channels=3,
        **changes,
    )


def llava(side: int) -> Any:
    """Return LLaVA: CLIP, an MLP, a Llama with multi-head attention."""
    return transformers.LlavaConfig(
        vision_config=tower(side, 192, CELL, model_type="clip_vision_model"),
        text_config={**TEXT, "model_type": "llama", "head_dim": 64},
        image_token_index=IMAGE,
        image_seq_length=side**2,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )


def deep(side: int) -> Any:
    """Return 24 layers of a Mistral after SigLIP, for pages of 256 visual tokens."""
    text = {"num_hidden_layers": 24, "hidden_size": 320, "intermediate_size": 896, "head_dim": 64}
    return transformers.LlavaConfig(
        vision_config=tower(
            side, 256, CELL, model_type="siglip_vision_model", vision_use_head=False
        ),
        text_config={
            **TEXT,
            **text,
            "model_type": "mistral",
            "num_key_value_heads": 2,
            "sliding_window": None,
        },
        image_token_index=IMAGE,
        image_seq_length=side**2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )


def qwen2_vl(side: int) -> Any:
    """Return Qwen2-VL: 3-D rotary positions, biases in q, k and v, films."""
    text = {**TEXT, "model_type": "qwen2_vl_text", "num_key_value_heads": 2}
    return transformers.Qwen2VLConfig(
        vision_config=qwen_tower(embed_dim=192, hidden_size=256, mlp_ratio=4),
        text_config={**text, "rope_parameters": MROPE},
        **IDS,
    )


def qwen3_vl(side: int) -> Any:
    """Return Qwen3-VL: norms of q and k, four queries a head, features into two layers."""
    text = {
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    vision = qwen_tower(
        hidden_size=192,
        out_hidden_size=256,
        intermediate_size=768,
        num_position_embeddings=(2 * side) ** 2,
        deepstack_visual_indexes=[1],
    )
    return transformers.Qwen3VLConfig(
        vision_config=vision,
        text_config={**TEXT, **text, "model_type": "qwen3_vl_text", "rope_parameters": MROPE},
        **IDS,
    )


def gemma3(side: int) -> Any:
    """Return Gemma 3: head_dim 256, pictures that see themselves whole, windows of 96 tokens."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2
    text = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 96,
    }
    text |= {"query_pre_attn_scalar": 256, "layer_types": kinds, "intermediate_size": 640}
    return transformers.Gemma3Config(
        vision_config=tower(
            side, 192, PATCH, model_type="siglip_vision_model", vision_use_head=False
        ),
        text_config={**TEXT, **text, "model_type": "gemma3_text"},
        image_token_index=IMAGE,
        boi_token_index=ID["<vision>"],
        eoi_token_index=ID["</vision>"],
        mm_tokens_per_image=side**2,
        tie_word_embeddings=True,
    )


def internvl(side: int) -> Any:
    """Return InternVL: pixel shuffle, a Qwen2 with six queries a head and slow rotary positions."""
    text = {"num_hidden_layers": 10, "hidden_size": 384, "intermediate_size": 1024}
    text |= {"num_attention_heads": 6, "num_key_value_heads": 1}
    vision = tower(side, 192, PATCH, model_type="internvl_vision", use_qk_norm=True)
    return transformers.InternVLConfig(
        vision_config=vision,
        text_config={
            **TEXT,
            **text,
            "model_type": "qwen2",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        image_token_id=IMAGE,
        image_seq_length=side**2,
        tie_word_embeddings=True,
    )


@dataclass(frozen=True)
class Member:
    """A model of the zoo. shapes: of the batches of one step, after the first stage."""

    name: str
    config: Callable[[int], Any]
    shapes: tuple[Shape, ...]
    first: tuple[Shape, ...]

    @property
    def side(self) -> int:
        """Cells of a picture."""
        return self.shapes[0].side

    def build(self, seed: int = 0) -> transformers.PreTrainedModel:
        """Return fresh fp32 weights."""
        torch.manual_seed(seed)
        config = self.config(self.side)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        _spread_biases(model)
        return model


def _spread_biases(model: transformers.PreTrainedModel) -> None:
    """Start biases of K at one, a few at eight in slow rotary pairs, as Qwen2 has them."""
    for name, bias in model.named_parameters():
        if name.endswith("k_proj.bias") and "visual" not in name and "vision" not in name:
            heads = bias.data.normal_().view(-1, 64)
            heads[:, [29, 31, 60]] += 8


SHORT = Shape(64, 128)
MEMBERS = {
    member.name: member
    for member in (
        Member(
            "llava",
            llava,
            (Shape(96, 192, 7, 1), Shape(24, 384)),
            (Shape(96, 128, 7, 1), SHORT),
        ),
        Member(
            "qwen2-vl",
            qwen2_vl,
            (Shape(64, 208, 8, 1), Shape(24, 160, 6, 1, FRAMES), Shape(16, 384)),
            (Shape(64, 160, 8, 1), SHORT),
        ),
        Member(
            "qwen3-vl",
            qwen3_vl,
            (Shape(32, 480, 10, 2), Shape(16, 384)),
            (Shape(48, 224, 10, 1), SHORT),
        ),
        Member(
            "gemma3",
            gemma3,
            (Shape(32, 400, 8, 2), Shape(16, 384)),
            (Shape(64, 160, 8, 1), SHORT),
        ),
        Member(
            "deep",
            deep,
            (Shape(12, 1152, 16, 3), Shape(8, 1024)),
            (Shape(32, 416, 16, 1), SHORT),
        ),
        Member(
            "internvl",
            internvl,
            (Shape(64, 224, 9, 1), Shape(24, 384)),
            (Shape(64, 176, 9, 1), SHORT),
        ),
    )
}


def _patches(pixels: Tensor, frames: int) -> Tensor:
    """Return Qwen's patches [N * grid, 3 * 2 * 8 * 8] of pixels [N, frames, 3, S, S]."""
    side = pixels.shape[-1] // PATCH
    x = pixels.unflatten(1, (frames // 2, 2)).unflatten(4, (side // 2, 2, PATCH))
    x = x.unflatten(7, (side // 2, 2, PATCH))  # N t 2 3 h m p w m p
    x = x.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    return x.reshape(-1, 3 * 2 * PATCH**2)


def _qwen_inputs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return pixels, grids and 3-D positions; one row's positions are every row's."""
    shape, ids = batch.shape, batch.ids
    side, device = 2 * shape.side, ids.device
    types = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    if shape.frames:
        pixels, count, kind = _patches(batch.pixels, shape.frames), 1, "video"
        given = {"pixel_values_videos": pixels}
    else:
        twice = batch.pixels.flatten(0, 1)[:, None].expand(-1, 2, -1, -1, -1)
        pixels, count, kind = _patches(twice, 2), shape.pictures, "image"
        given = {"pixel_values": pixels}
    grid = torch.tensor([[max(shape.frames // 2, 1), side, side]], device=device)
    given |= {f"{kind}_grid_thw": grid.repeat(len(ids) * count, 1), "mm_token_type_ids": types}
    positions, _ = model.model.get_rope_index(
        ids[:1],
        mm_token_type_ids=types[:1],
        attention_mask=torch.ones_like(ids[:1]),
        **{f"{kind}_grid_thw": grid.repeat(count, 1)},
    )
    return given | {"position_ids": positions.expand(-1, len(ids), -1)}


def model_inputs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the forward's arguments for a batch."""
    given, kind = {"input_ids": batch.ids}, model.config.model_type
    if kind == "gemma3":
        given["token_type_ids"] = (batch.ids == IMAGE).long()
    if batch.pixels is None:
        return given
    if kind.startswith(PATCHED):
        return given | _qwen_inputs(model, batch)
    pixels = batch.pixels if kind == "smolvlm" else batch.pixels.flatten(0, 1)
    return given | {"pixel_values": pixels}


def feature_module(model: Any) -> torch.nn.Module:
    """Return the module whose output is the visual tokens in order, to hook it."""
    if model.config.model_type.startswith(PATCHED):
        return model.model.visual.merger
    if model.config.model_type == "smolvlm":
        return model.model.connector
    return model.model.multi_modal_projector
