"""A random InternVL of a few thousand parameters and a word-level processor, built without files.

16 visual tokens per picture of 32 x 32 pixels.
"""

import numpy as np
import torch
import transformers
from PIL import Image

from duotone.tasks import Example, Task

WORDS = [
    "<pad>",
    "<end>",
    "<image>",
    "user",
    "assistant",
    "what",
    "is",
    "this",
    "how",
    "many",
    "red",
]
WORDS += ["blue", "green", "a", "one", "two", "three", "left", "right", ":", "?", "yes", "no", "or"]
VISUAL_TOKENS = 16

# At this size threads only wait for each other, most of all on a busy machine.
torch.set_num_threads(1)


class TinyProcessor:
    """The part of a transformers processor that duotone uses, over whole words."""

    def apply_chat_template(self, conversations, *, processor_kwargs, **kwargs):
        assert processor_kwargs["padding_side"] == "left"
        encoded = [self._encode(conversation) for conversation in conversations]
        longest = max(len(ids) for ids, _ in encoded)
        rows = [[0] * (longest - len(ids)) + ids for ids, _ in encoded]
        pixels = [p for _, pictures in encoded for p in pictures]
        inputs = {"input_ids": torch.tensor(rows)}
        inputs["attention_mask"] = (inputs["input_ids"] != 0).long()
        return inputs | ({"pixel_values": torch.stack(pixels)} if pixels else {})

    def _encode(self, conversation):
        ids, pixels = [], []
        for message in conversation:
            ids += [WORDS.index(message["role"]), WORDS.index(":")]
            for part in message["content"]:
                if part["type"] == "image":
                    ids += [WORDS.index("<image>")] * VISUAL_TOKENS
                    scaled = (
                        np.asarray(part["image"].resize((32, 32)), dtype=np.float32) / 127.5 - 1
                    )
                    pixels.append(torch.from_numpy(scaled.copy()).permute(2, 0, 1))
                else:
                    ids += [WORDS.index(word) for word in part["text"].lower().split()]
        return [*ids, WORDS.index("assistant"), WORDS.index(":")], pixels

    def batch_decode(self, rows, *, skip_special_tokens):
        assert skip_special_tokens
        return [" ".join(WORDS[token] for token in row if token > 2) for row in rows]


class AnyWords(TinyProcessor):
    """A processor that takes words of any letters, as real ones do."""

    def _encode(self, conversation):
        (message,) = conversation
        *pictures, text = message["content"]
        known = [WORDS[3 + len(word) % 20] for word in text["text"].split()]
        return super()._encode(
            [message | {"content": [*pictures, text | {"text": " ".join(known)}]}]
        )


def tiny_model(seed: int = 0):
    """A random InternVL: 3 layers, 4 query and 2 kv heads of 16 channels."""
    torch.manual_seed(seed)
    config = transformers.InternVLConfig(
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "image_size": [32, 32],
            "patch_size": [4, 4],
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(WORDS),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        image_token_id=2,
        image_seq_length=16,
        downsample_ratio=0.5,
    )
    model = transformers.InternVLForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            gain = 4.0 if "lm_head" in name else 2.0
            parameter.data.normal_(0, gain * parameter[0].numel() ** -0.5)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    model.generation_config.suppress_tokens = [2]  # random weights would write picture tokens
    return model


def noise(seed: int, size: int = 32) -> Image.Image:
    """A grey picture of noise. Pillow's own noise depends on all that the process drew before."""
    levels = np.random.default_rng(seed).normal(128, 90, (size, size))
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def tiny_example(split: str, index: int) -> Example:
    """One or two pictures of noise; questions of different lengths."""
    pixels = np.random.default_rng(index).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    images = tuple(Image.fromarray(picture) for picture in pixels[: 1 + index % 2])
    question = ("what is this ?", "how many red ?", "is this left or right ?")[index % 3]
    return Example(f"{split}-{index}", images, question, ("one", "two"))


TINY_TASK = Task(
    name="tiny",
    source=tiny_example,
    metrics=("anls", "accuracy"),
    headline="anls",
    max_new_tokens=6,
    size=20,
)


def pictured(indices):
    """A left-padded batch of samples of the tiny task."""
    examples = [TINY_TASK.example(i) for i in indices]
    return TinyProcessor().apply_chat_template(
        [e.messages() for e in examples], processor_kwargs={"padding_side": "left"}
    )
