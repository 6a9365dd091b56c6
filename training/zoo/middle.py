"""Models with 121 to 196 tokens a picture, on which no constant was chosen."""

from typing import Any

import transformers

from .batches import Shape
from .glyphs import CELL
from .members import SHORT, TEXT, Member, internvl, llava, qwen3_vl, tower
from .vocabulary import IMAGE


def llava_phi(side: int) -> Any:
    """Return LLaVA with a Phi: MLPs beside attention, biases, positions in half of the channels."""
    positions = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return transformers.LlavaConfig(
        vision_config=tower(side, 192, CELL, model_type="clip_vision_model"),
        text_config={
            **TEXT,
            "num_hidden_layers": 10,
            "model_type": "phi",
            "rope_parameters": positions,
        },
        image_token_index=IMAGE,
        image_seq_length=side**2,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )


MIDDLE = {
    member.name: member
    for member in (
        Member(
            "llava-phi",
            llava_phi,
            (Shape(48, 272, 11, 1), Shape(24, 384)),
            (Shape(48, 240, 11, 1), SHORT),
        ),
        Member(
            "internvl-144",
            internvl,
            (Shape(48, 288, 12, 1), Shape(24, 384)),
            (Shape(48, 240, 12, 1), SHORT),
        ),
        Member(
            "llava-169",
            llava,
            (Shape(48, 320, 13, 1), Shape(24, 384)),
            (Shape(48, 272, 13, 1), SHORT),
        ),
        Member(
            "qwen3-vl-196",
            qwen3_vl,
            (Shape(48, 352, 14, 1), Shape(24, 384)),
            (Shape(48, 304, 14, 1), SHORT),
        ),
    )
}
