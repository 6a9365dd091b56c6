"""Multimodal models of real shapes with random weights, and prompts for them.

The time of a step depends on the shape, not on what the weights say, so a benchmark needs no
checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PAD = 0
_QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151674,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 151674,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_TINY = {
    "model_type": "qwen2",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_TOWER = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_SMALL_TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
# {name: (language model, vision tower, side of a tile in pixels)}. InternVL's tower and projector
# before Qwen2.5-7B's decoder (InternVL3-8B), before Llama-3-8B's, and before a tiny one.
SHAPES = {
    "internvl3-8b": (_QWEN, _TOWER, 448),
    "internvl-llama3-8b": (_LLAMA, _TOWER, 448),
    "tiny": (_TINY, _SMALL_TOWER, 112),
}
PATCH, SPREAD = 14, 0.02


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of `SHAPES` with random weights, which never ends an answer and writes no picture."""
    import transformers

    text, tower, side = SHAPES[shape]
    sizes = {"image_size": [side, side], "patch_size": [PATCH, PATCH]}
    config = transformers.InternVLConfig(
        vision_config={**tower, "intermediate_size": 4 * tower["hidden_size"], **sizes},
        text_config={**text, "max_position_embeddings": 40000, "pad_token_id": PAD},
        image_token_id=image_id(shape),
        image_seq_length=tile_tokens(shape),
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = transformers.InternVLForConditionalGeneration._from_config(config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.to(dtype).parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, SPREAD, generator=generator)
    own = model.generation_config
    own.eos_token_id, own.pad_token_id, own.suppress_tokens = None, PAD, [image_id(shape)]
    return model.eval()


def image_id(shape: str) -> int:
    """Id that stands for a visual token."""
    return SHAPES[shape][0]["vocab_size"] - 7


def tile_tokens(shape: str) -> int:
    """Visual tokens of one tile of a picture."""
    return (SHAPES[shape][2] // PATCH // 2) ** 2


def random_prompt(
    shape: str, model: Any, batch: int, tokens: int, padded: bool = False
) -> dict[str, Tensor]:
    """A picture of as many tiles as fit, and text before and after it: arguments of `generate`.

    tokens: of the longest prompt. padded: prompts end with up to 6 tokens less, and are padded on
    the left.
    Errors: ValueError for fewer tokens than a tile and 8 of text.
    """
    of_tile = tile_tokens(shape)
    tiles = (tokens - 8) // of_tile
    if tiles < 1:
        raise ValueError(
            f"--tokens must hold a tile of {of_tile} visual tokens and 8 of text; got {tokens}"
        )
    text = tokens - tiles * of_tile
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(5, image_id(shape), (batch, text), generator=draw)
    picture = torch.full((batch, tiles * of_tile), image_id(shape))
    ids = torch.cat([words[:, : text // 2], picture, words[:, text // 2 :]], 1)
    mask = torch.ones_like(ids)
    for row in range(batch if padded else 0):
        missing = row % 7
        ids[row] = torch.cat([torch.full((missing,), PAD), ids[row, : tokens - missing]])
        mask[row, :missing] = 0
    side = SHAPES[shape][2]
    pixels = torch.randn(batch * tiles, 3, side, side, generator=draw)
    given = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels.to(model.dtype)}
    return {name: x.to(model.device) for name, x in given.items()}


def prompt_of_noise(loaded: Any, batch: int, tokens: int) -> dict[str, Tensor]:
    """Pictures of noise and words, about `tokens` of them in each row: arguments of `generate`.

    loaded: a model with its processor (`duotone.loading.load`).
    """
    from PIL import Image

    from duotone.inference.batch import encode
    from duotone.inference.prompts import encode_text, tokenizer_of

    device, dtype = loaded.model.device, loaded.model.dtype
    if not loaded.takes_images:
        text = "one two three four " * tokens
        found = encode_text(tokenizer_of(loaded.processor), [text] * batch, longest=tokens)
        return {name: x.to(device) for name, x in found.items()}
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (448, 448, 3), generator=draw, dtype=torch.uint8)
    picture = Image.fromarray(pixels.numpy())

    def asked(pictures: int) -> dict[str, Tensor]:
        content = [{"type": "image", "image": picture}] * pictures
        content.append({"type": "text", "text": "What is this?"})
        return encode(loaded.processor, [[{"role": "user", "content": content}]] * batch)

    one, two = (asked(n)["input_ids"].shape[1] for n in (1, 2))
    found = asked(max(1, round(1 + (tokens - one) / (two - one))))
    return {
        name: x.to(device, dtype if x.is_floating_point() else None) for name, x in found.items()
    }
