"""Build duotone-tiny without its weights: tokenizer, processor, configuration.

    python training/build.py src/duotone/models/duotone_tiny

The processor is transformers' QianfanOCRProcessor: InternVL's prompt format (<img>, 256 times
<IMG_CONTEXT>, </img>) without the video processor, for which InternVLProcessor needs torchvision.
The image processor is the PIL one by name, so that pictures become the same numbers everywhere.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qianfan_ocr.processing_qianfan_ocr import QianfanOCRProcessor

from duotone.tasks.synthetic import documents, pairs, scenes, sequences

VOCABULARY = 1280
IMAGE_TOKENS = 256
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
ROLES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- set pictures = message['content'] | selectattr('type', 'equalto', 'image') | list | length -%}
{%- set state = namespace(index=0) -%}
{%- for item in message['content'] -%}
{%- if item['type'] == 'image' -%}
{%- set state.index = state.index + 1 -%}
{%- if pictures > 1 -%}
Frame{{ state.index }}: {% endif -%}
<image>
{% else -%}
{{ item['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def generated_text(count: int = 4000) -> Iterator[str]:
    """Yield prompts and answers as the model will see them."""
    for seed in range(count):
        for task in (scenes, documents, sequences, pairs):
            for turn in task.generate(seed).turns:
                yield f"user\nFrame1: {turn.question}"
                yield f"assistant\n{turn.answers[-1]}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train byte-level BPE; digits and capitals stand alone, so codes are spelled out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[A-Z]|\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(generated_text(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        extra_special_tokens=ROLES,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> InternVLConfig:
    """Return the architecture: 11 M weights, 1,024 patches, 256 visual tokens a picture."""
    text = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_sliding_window=False,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=tokenizer.eos_token_id,
    )
    vision = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "image_size": [256, 256],
        "patch_size": [8, 8],
    }
    return InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=IMAGE_TOKENS,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=[InternVLForConditionalGeneration.__name__],
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> QianfanOCRProcessor:
    """Return the processor: one 256 x 256 tile per picture, values from -1 to 1."""
    pictures = GotOcr2ImageProcessorPil(
        crop_to_patches=False,
        size={"height": 256, "width": 256},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return QianfanOCRProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        image_seq_length=IMAGE_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def name_pil_backend(folder: Path) -> None:
    """Name the PIL class in the file: saving drops the suffix, loading would guess."""
    path = folder / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["image_processor_type"] = "GotOcr2ImageProcessorPil"
    path.write_text(json.dumps(config, indent=2) + "\n")


def main(folder: Path) -> None:
    """Write everything but the weights."""
    tokenizer = build_tokenizer()
    build_processor(tokenizer).save_pretrained(folder)
    name_pil_backend(folder)
    config = build_config(tokenizer)
    config.save_pretrained(folder)
    GenerationConfig(
        do_sample=False,
        max_new_tokens=160,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder)
    weights = InternVLForConditionalGeneration(config).num_parameters()
    print(f"{weights / 1e6:.2f} M weights, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
