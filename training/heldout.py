"""Greedy answers on held-out seeds, in batches, and simple scores for the training log."""

import re
from itertools import pairwise
from pathlib import Path
from random import Random

import torch
from transformers import AutoProcessor

from data import GENERATORS
from duotone.tasks.synthetic.drawing import SHAPES
from duotone.tasks.synthetic.sample import HELD_OUT_SEEDS

NEW_TOKENS = {"captions": 100, "documents": 24, "scenes": 24, "sequences": 8, "pairs": 24}


def similarity(answer: str, reference: str) -> float:
    """Return one minus the edit distance over the longer length, zero below one half (ANLS)."""
    row = list(range(len(reference) + 1))
    for i, a in enumerate(answer, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(reference, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    value = 1 - row[-1] / max(len(answer), len(reference), 1)
    return value if value >= 0.5 else 0.0


def questions(task: str, count: int) -> list[dict]:
    """Return one question each about so many held-out samples; captions come as their own task."""
    items = []
    for seed in range(HELD_OUT_SEEDS.start, HELD_OUT_SEEDS.start + count):
        sample = GENERATORS["scenes" if task == "captions" else task].generate(seed)
        if task == "captions":
            turns = sample.of_kind("caption")
        else:
            turns = [t for t in sample.turns if t.kind not in ("caption", "transcript")]
        turn = Random(seed).choice(turns)
        items.append({"seed": seed, "sample": sample, "turn": turn})
    return items


def _messages(item: dict) -> list[dict]:
    pictures = [{"type": "image", "image": picture} for picture in item["sample"].images]
    return [
        {"role": "user", "content": [*pictures, {"type": "text", "text": item["turn"].question}]}
    ]


@torch.inference_mode()
def answer(model, processor, items: list[dict], new_tokens: int, batch: int = 100) -> list[str]:
    """Generate greedily, left-padded."""
    texts = []
    for start in range(0, len(items), batch):
        inputs = processor.apply_chat_template(
            [_messages(item) for item in items[start : start + batch]],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        ).to(model.device)
        ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        texts += processor.batch_decode(
            ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return texts


def _caption_scores(items: list[dict], texts: list[str]) -> dict[str, float]:
    """Precision and recall of the objects (colour and shape) that captions name."""
    named = hit = present = 0
    for item, text in zip(items, texts, strict=True):
        words = re.findall(r"[a-z]+", text.lower())
        objects = item["sample"].objects
        hit += len({f"{colour} {shape}" for colour, shape in pairwise(words)} & objects)
        present += len(objects)
        named += sum(word in SHAPES for word in words)
    return {"object_recall": hit / present, "words_per_object": named / max(hit, 1)}


def _row(task: str, item: dict, text: str) -> dict:
    turn = item["turn"]
    return {
        "task": task,
        "seed": item["seed"],
        "kind": turn.kind,
        "question": turn.question,
        "answers": turn.answers,
        "prediction": text,
    }


def _answer_scores(items: list[dict], texts: list[str]) -> dict[str, float]:
    """Share of exact answers and mean similarity, case ignored."""
    best = [
        max(similarity(text.lower(), answer.lower()) for answer in item["turn"].answers)
        for item, text in zip(items, texts, strict=True)
    ]
    exact = sum(value == 1 for value in best)
    return {"exact": exact / len(items), "anls": sum(best) / len(items)}


def evaluate(model, folder: Path, count: int) -> tuple[dict, list[dict]]:
    """Return scores and every prediction on held-out samples of every task."""
    processor = AutoProcessor.from_pretrained(folder)
    scores, rows = {}, []
    for task, new_tokens in NEW_TOKENS.items():
        items = questions(task, count)
        texts = answer(model, processor, items, new_tokens)
        rows += [_row(task, item, text) for item, text in zip(items, texts, strict=True)]
        measure = _caption_scores if task == "captions" else _answer_scores
        scores[task] = measure(items, texts)
    return scores, rows
