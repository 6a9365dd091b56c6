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
# InternVL2.5's decoders: InternLM2.5-7B and InternLM2.5-20B.
_INTERNLM_7B = {**_LLAMA, "vocab_size": 92553}
_INTERNLM_20B = {
    "model_type": "llama",
    "vocab_size": 92553,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 48,
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
# InternViT-6B.
_LARGE_TOWER = {
    "hidden_size": 3200,
    "num_hidden_layers": 45,
    "num_attention_heads": 25,
    "norm_type": "rms_norm",
    "use_qk_norm": True,
}
_SMALL_TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
# {name: (language model, vision tower, side of a tile in pixels)}. InternVL's tower and projector
# before Qwen2.5-7B's decoder (InternVL3-8B), Llama-3-8B's, InternVL2.5's two, and a tiny one.
SHAPES = {
    "internvl3-8b": (_QWEN, _TOWER, 448),
    "internvl-llama3-8b": (_LLAMA, _TOWER, 448),
    "internvl2.5-8b": (_INTERNLM_7B, _TOWER, 448),
    "internvl2.5-26b": (_INTERNLM_20B, _LARGE_TOWER, 448),
    "tiny": (_TINY, _SMALL_TOWER, 112),
}
PATCH, SPREAD = 14, 0.02
# Least text of a prompt, and different lengths of padded ones.
TEXT, UNEQUAL = 16, 7

Inputs = dict[str, Tensor]


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of `SHAPES` with random weights."""
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
    return random_model_of(config, device, dtype)


def random_model_of(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of any configuration with random weights, in evaluation mode."""
    from duotone.hf.weights.checkpoint import model_class

    with device:
        model = model_class(config).from_config(config, dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.to(dtype).parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, SPREAD, generator=generator)
    return model.eval()


def image_id(shape: str) -> int:
    """Id that stands for a visual token."""
    return SHAPES[shape][0]["vocab_size"] - 7


def tile_tokens(shape: str) -> int:
    """Visual tokens of one tile of a picture."""
    return (SHAPES[shape][2] // PATCH // 2) ** 2


def random_prompt(shape: str, model: Any, batch: int, tokens: int) -> Inputs:
    """A picture of as many tiles as fit, and text before and after it: arguments of `generate`.

    tokens: of a prompt. Errors: ValueError for fewer tokens than a tile and 16 of text.
    """
    of_tile = tile_tokens(shape)
    tiles = (tokens - TEXT) // of_tile
    if tiles < 1:
        raise ValueError(
            f"--tokens must hold a tile of {of_tile} visual tokens and {TEXT} of text; got {tokens}"
        )
    return tiled_prompt(shape, model, batch, tiles, tokens - tiles * of_tile)


def tiled_prompt(shape: str, model: Any, batch: int, tiles: int, text: int) -> Inputs:
    """A picture of so many tiles, and text before and after it: arguments of `generate`."""
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(5, image_id(shape), (batch, text), generator=draw)
    picture = torch.full((batch, tiles * tile_tokens(shape)), image_id(shape))
    ids = torch.cat([words[:, : text // 2], picture, words[:, text // 2 :]], 1)
    side = SHAPES[shape][2]
    pixels = torch.randn(batch * tiles, 3, side, side, generator=draw)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["pixel_values"] = pixels.to(model.dtype)
    return {name: x.to(model.device) for name, x in given.items()}


def short_prompt(shape: str, model: Any) -> Inputs:
    """One sequence with one tile."""
    return random_prompt(shape, model, 1, tile_tokens(shape) + TEXT)


def marked_prompt(
    model: Any, batch: int, tokens: int, text: int = TEXT, picture: int | None = None
) -> tuple[Inputs, Tensor | None]:
    """Words alone, and a mask [batch, tokens] of those that count as visual: all but `text`.

    picture: tokens of a picture, with a word of text before the next one; None: one picture.
    The model's vision tower does not run. A model that takes no pictures has no mask.
    Errors: ValueError for no tokens but those of text.
    """
    from duotone.hf.model.facts import model_facts, visual_token_ids

    if tokens <= text:
        raise ValueError(f"--tokens must be more than {text}; got {tokens}")
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, vocabulary, (batch, tokens), generator=draw)
    for visual in visual_token_ids(model.config):
        ids[ids == visual] = PAD
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    mask = torch.zeros_like(ids, dtype=torch.bool)
    seen = mask[:, text // 2 : text // 2 - text]
    seen[:] = True
    if picture is not None:
        seen[:, picture :: picture + 1] = False
    on_device = {name: x.to(model.device) for name, x in given.items()}
    is_multimodal = model_facts(model, visual_mask=mask).is_multimodal
    return on_device, mask.to(model.device) if is_multimodal else None


def left_padded(given: Inputs, pad: int = PAD) -> Inputs:
    """Prompts that end up to 6 tokens earlier, row by row, and are padded on the left.

    given: arguments of `generate`; those of shape [batch, tokens] change.
    """
    shape = given["input_ids"].shape
    made = dict(given)
    for name, x in given.items():
        if x.shape == shape:
            made[name] = x.clone()
            for row in range(shape[0]):
                made[name][row] = x[row].roll(row % UNEQUAL)
                made[name][row, : row % UNEQUAL] = pad if name == "input_ids" else 0
    return made


def prompt_of_noise(loaded: Any, batch: int, tokens: int) -> Inputs:
    """Pictures of noise and words, about `tokens` of them in each row: arguments of `generate`.

    loaded: a model with its processor (`duotone.loading.load`).
    """
    from PIL import Image

    from duotone.inference.batch import encode
    from duotone.inference.prompts import encode_text, tokenizer_of

    device, dtype = loaded.model.device, loaded.model.dtype
    if not loaded.takes_images:
        text = "one two three four " * tokens
        found = encode_text(tokenizer_of(loaded.processor), [text] * batch)
        return {name: x[:, :tokens].to(device) for name, x in found.items()}
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (448, 448, 3), generator=draw, dtype=torch.uint8)
    picture = Image.fromarray(pixels.numpy())

    def asked(pictures: int) -> Inputs:
        content = [{"type": "image", "image": picture}] * pictures
        content.append({"type": "text", "text": "What is this?"})
        return encode(loaded.processor, [[{"role": "user", "content": content}]] * batch)

    one, two = (asked(n)["input_ids"].shape[1] for n in (1, 2))
    found = asked(max(1, round(1 + (tokens - one) / (two - one))))
    return {
        name: x.to(device, dtype if x.is_floating_point() else None) for name, x in found.items()
    }
