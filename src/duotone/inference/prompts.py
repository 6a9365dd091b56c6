"""Prompts of text alone: tokens, padded on the left."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer inside a multimodal processor, or the tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def left_padded(rows: Sequence[Sequence[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """Rows of ids -> input_ids and attention_mask [B, longest row]."""
    width = max(len(row) for row in rows)
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def right_padded(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, True at tokens), both [B, longest row]; ids are 0 after a row's end."""
    tensors = [torch.tensor(list(row), dtype=torch.long) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids.to(device), (torch.arange(ids.shape[1]) < lengths[:, None]).to(device)


def encode_text(tokenizer: Any, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Prompts of text alone -> left-padded input_ids and attention_mask [B, tokens].

    They go through the tokenizer's chat template where it has one.
    """
    templated = tokenizer.chat_template
    if templated:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    rows = tokenizer(list(texts), add_special_tokens=not templated)["input_ids"]
    return left_padded(rows, tokenizer.pad_token_id or 0)


def encoder_of(processor: Any) -> Callable[[str], list[int]]:
    """text -> token ids, with the tokenizer's own special tokens."""
    tokenizer = tokenizer_of(processor)
    # A text is cut into windows afterwards: its length is no reason to warn.
    return lambda text: tokenizer(text, verbose=False)["input_ids"]
