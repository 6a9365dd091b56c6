"""Models that nothing is chosen on: their rows say what choices made on the zoo are worth."""

from typing import Any

import transformers

from .batches import Shape
from .glyphs import CELL
from .members import IDS, MEMBERS, MROPE, PATCH, SHORT, TEXT, Member, qwen_tower, tower
from .middle import MIDDLE
from .vocabulary import IMAGE

HEAD_DIM = 128


def internvl35(side: int) -> Any:
    """Return InternVL 3.5: a Qwen3 with norms of q and k, heads of 128 channels."""
    text = {"hidden_size": 320, "intermediate_size": 896, "num_key_value_heads": 2}
    vision = tower(side, 192, PATCH, model_type="internvl_vision", use_qk_norm=True)
    positions = {"rope_type": "default", "rope_theta": 5e6}
    return transformers.InternVLConfig(
        vision_config=vision,
        text_config={
            **TEXT,
            **text,
            "model_type": "qwen3",
            "head_dim": HEAD_DIM,
            "rope_parameters": positions,
        },
        image_token_id=IMAGE,
        image_seq_length=side**2,
        tie_word_embeddings=True,
    )


def glm4v(side: int) -> Any:
    """Return GLM-4.1V: norms after attention and MLP, 3-D positions in a half of the channels."""
    heads = 3
    text = {"hidden_size": heads * HEAD_DIM, "intermediate_size": 1024}
    text |= {"num_attention_heads": heads, "num_key_value_heads": 1}
    vision = qwen_tower(hidden_size=192, intermediate_size=768, image_size=side * CELL)
    vision["out_hidden_size"] = text["hidden_size"]
    positions = {**MROPE, "partial_rotary_factor": 0.5}
    return transformers.Glm4vConfig(
        vision_config=vision,
        text_config={**TEXT, **text, "model_type": "glm4v_text", "rope_parameters": positions},
        image_token_id=IMAGE,
        video_token_id=IDS["video_token_id"],
        image_start_token_id=IDS["vision_start_token_id"],
        image_end_token_id=IDS["vision_end_token_id"],
        tie_word_embeddings=True,
    )


def aya_vision(side: int) -> Any:
    """Return Aya Vision: MLPs beside attention, every fourth layer without window and positions."""
    text = {"num_hidden_layers": 12, "num_key_value_heads": 2, "sliding_window": 96}
    return transformers.AyaVisionConfig(
        vision_config=tower(
            side, 192, PATCH, model_type="siglip_vision_model", vision_use_head=False
        ),
        text_config={**TEXT, **text, "model_type": "cohere2", "logit_scale": 1.0},
        image_token_index=IMAGE,
        tie_word_embeddings=True,
    )


def qwen35(side: int) -> Any:
    """Return Qwen3.5: linear attention in three layers of four, gates after attention."""
    text = {"num_hidden_layers": 12, "num_key_value_heads": 2, "head_dim": HEAD_DIM}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    text |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "hidden_size": 320}
    vision = qwen_tower(hidden_size=192, intermediate_size=768, out_hidden_size=320)
    vision["num_position_embeddings"] = (2 * side) ** 2
    positions = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    positions |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return transformers.Qwen3_5Config(
        vision_config=vision,
        text_config={
            **TEXT,
            **text,
            "model_type": "qwen3_5_text",
            "rope_parameters": positions,
        },
        **IDS,
    )


def smolvlm(side: int) -> Any:
    """Return SmolVLM: pixel shuffle, a picture in several spans, a Llama with 3 queries a head."""
    text = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 10}
    text |= {"num_attention_heads": 6, "num_key_value_heads": 2}
    return transformers.SmolVLMConfig(
        vision_config=tower(side, 192, PATCH, model_type="smolvlm_vision"),
        text_config={**TEXT, **text, "model_type": "llama", "head_dim": 64},
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=True,
    )


UNSEEN = {
    member.name: member
    for member in (
        Member(
            "internvl3.5",
            internvl35,
            (Shape(48, 304, 12, 1), Shape(24, 384)),
            (Shape(48, 240, 12, 1), SHORT),
        ),
        Member(
            "glm4v",
            glm4v,
            (Shape(48, 368, 7, 2), Shape(16, 384)),
            (Shape(96, 128, 7, 1), SHORT),
        ),
        Member(
            "aya-vision",
            aya_vision,
            (Shape(48, 256, 10, 1), Shape(24, 384)),
            (Shape(48, 224, 10, 1), SHORT),
        ),
        Member(
            "qwen3.5",
            qwen35,
            (Shape(32, 416, 9, 2), Shape(16, 384)),
            (Shape(48, 208, 9, 1), SHORT),
        ),
        Member(
            "smolvlm",
            smolvlm,
            (Shape(32, 400, 8, 3), Shape(16, 384)),
            (Shape(64, 160, 8, 1), SHORT),
        ),
    )
}
EVERY = MEMBERS | MIDDLE | UNSEEN
