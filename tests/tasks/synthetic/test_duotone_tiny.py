import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import duotone.models
from duotone.models import duotone_tiny_path
from duotone.tasks.synthetic import documents, scenes, sequences
from duotone.tasks.synthetic.sample import HELD_OUT_SEEDS

EXAMPLES = Path(duotone.models.__file__).parents[1] / "examples"
BUNDLED = json.loads((EXAMPLES / "examples.json").read_text())


@pytest.fixture(scope="module")
def tiny():
    path = duotone_tiny_path()
    return AutoModelForImageTextToText.from_pretrained(path), AutoProcessor.from_pretrained(path)


def prompt(processor, pictures, question):
    content = [{"type": "image", "image": picture} for picture in pictures]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
    return processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def ask(tiny, pictures, question):
    model, processor = tiny
    inputs = prompt(processor, pictures, question)
    ids = model.generate(**inputs)
    return processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("pictures", [1, 2, 4])
def test_every_picture_becomes_256_visual_tokens(tiny, pictures):
    model, processor = tiny
    images = sequences.generate(HELD_OUT_SEEDS.start).images[:pictures]
    inputs = prompt(processor, images, "How many objects are in frame 1?")
    visual = (inputs["input_ids"] == model.config.image_token_id).sum()
    assert visual == 256 * pictures
    assert inputs["pixel_values"].shape == (pictures, 3, 256, 256)
    assert inputs["pixel_values"].abs().max() <= 1


def test_it_is_small_and_in_bf16(tiny):
    model, _ = tiny
    assert model.num_parameters() < 12_000_000
    assert model.dtype == torch.bfloat16
    assert sum(file.stat().st_size for file in duotone_tiny_path().iterdir()) < 25_000_000


def test_end_and_padding_are_different_tokens(tiny):
    _, processor = tiny
    assert processor.tokenizer.eos_token == "<|im_end|>"
    assert processor.tokenizer.pad_token_id != processor.tokenizer.eos_token_id


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_pictures_are_held_out_and_fresh(name):
    example = BUNDLED[name]
    generator = {"scene": scenes, "document": documents, "frames": sequences}[name]
    assert example["seed"] in HELD_OUT_SEEDS
    sample = generator.generate(example["seed"])
    for file, picture in zip(example["files"], sample.images, strict=True):
        assert Image.open(EXAMPLES / file).tobytes() == picture.tobytes()


@pytest.mark.parametrize("count", [1, pytest.param(None, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", BUNDLED)
def test_it_answers_the_bundled_questions(tiny, name, count):
    pictures = [Image.open(EXAMPLES / file) for file in BUNDLED[name]["files"]]
    assert len(BUNDLED[name]["questions"]) >= 4
    for turn in BUNDLED[name]["questions"][:count]:
        assert ask(tiny, pictures, turn["question"]) in turn["answers"]
