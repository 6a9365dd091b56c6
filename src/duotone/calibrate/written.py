"""Text that a model writes itself, to calibrate its stream of text without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from duotone.hf.model.facts import visual_token_ids
from duotone.inference.encoded import ANSWER_TOKENS, IDS, VISUAL, EncodedPrompts, longest_stretch
from duotone.inference.prompts import tokenizer_of
from duotone.tasks import WRITTEN

from .answers import without_tokens

CONTEXT = 512
# Rows that are written at once; a row does not depend on how many are asked for.
TOGETHER = 8
APART = 1_000_003  # seeds have no rows in common below this number of rows
# Ends of the names by which configs call special tokens, such as boi_token_index of Gemma 3.
SPECIAL = ("_id", "_ids", "_token_index")


@dataclass(frozen=True)
class Written:
    """Stretches of `context` tokens that a model samples from its own next-token distributions.

    A stretch begins with the tokenizer's token for it, if there is one, and a random token. Special
    tokens and placeholders of pictures are never written, in answers neither: those have no end.
    seed: of all random numbers. begin: ids in place of the tokenizer's token, such as those of a
    user's turn. tokens: number of ids in use, which are the first ones; None: the tokenizer's, or
    all that the model has.
    """

    context: int = CONTEXT
    seed: int = 0
    max_new_tokens: int = ANSWER_TOKENS
    begin: tuple[int, ...] | None = None
    tokens: int | None = None
    name: str = WRITTEN

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"context must be >= 1 token, got {self.context}")

    def check_samples(self, samples: int) -> None:
        """Raise ValueError for no samples; a model writes any number of them."""
        if samples < 1:
            raise ValueError(f"samples must be >= 1, got {samples}")

    def encoded(self, loaded: Any, count: int) -> EncodedPrompts:
        """`count` stretches as token ids, on the CPU; the first ones are those of any other count.

        No stretch is longer than the model's positions allow. Random states stay as they are.
        Errors: ValueError where the model cannot write such stretches.
        """
        model, tokenizer = loaded.model, tokenizer_of(loaded.processor)
        length = longest_stretch(model, self.context, self.max_new_tokens)
        never = never_written(model, tokenizer, self.tokens)
        own = getattr(tokenizer, "bos_token_id", None)
        begin = (() if own is None else (own,)) if self.begin is None else self.begin
        rows: list[Tensor] = []
        while len(rows) < count:
            seed = APART * self.seed + len(rows)
            start = _starts(model, begin, never, seed)
            rows += _sampled(model, start, length, never, seed).cpu()
        # Without a mask, a model whose config names no placeholders would not be taken.
        prompts = ({IDS: row, VISUAL: torch.zeros_like(row, dtype=torch.bool)} for row in rows)
        made = tuple(prompts)[:count]
        return EncodedPrompts(self.name, made, self.max_new_tokens, tuple(never))


def vocabulary(model: Any) -> int:
    """Number of tokens that a model can be given and can write."""
    return min(
        model.get_input_embeddings().num_embeddings,
        model.config.get_text_config(decoder=True).vocab_size,
    )


def never_written(model: Any, tokenizer: Any, tokens: int | None = None) -> list[int]:
    """Ids that are no text: special ones, placeholders of pictures, and those that nobody uses.

    tokens: see `Written`.
    """
    config, size = model.config, vocabulary(model)
    found = set(visual_token_ids(config)) | set(getattr(tokenizer, "all_special_ids", ()))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found |= {number for number, token in added.items() if token.special}
    for owner in (config, config.get_text_config(decoder=True), model.generation_config):
        for name, value in vars(owner).items():
            if name.endswith(SPECIAL):
                found |= set(value if isinstance(value, (list, tuple)) else [value])
    found |= set(model.generation_config.suppress_tokens or ())
    if tokens is None:
        tokens = len(tokenizer) if hasattr(tokenizer, "__len__") else size
    found |= set(range(tokens, size))
    return sorted(i for i in found if isinstance(i, int) and 0 <= i < size)


def _starts(
    model: Any, begin: tuple[int, ...], never: list[int], seed: int
) -> Int[Tensor, "rows tokens"]:
    """Starts of rows: the tokens `begin`, and a random one of text."""
    words = torch.ones(vocabulary(model), dtype=torch.bool)
    words[never] = False
    if not words.any():
        raise ValueError(
            f"a model must have tokens of text to write with, got {len(words)} tokens, all of "
            "them special; give a text instead: --task text.txt"
        )
    known = words.nonzero()[:, 0]
    draw = torch.Generator().manual_seed(seed)
    one = known[torch.randint(len(known), (TOGETHER, 1), generator=draw)]
    return torch.cat([torch.tensor([begin] * TOGETHER, dtype=torch.long), one], 1)


@torch.inference_mode()
def _sampled(
    model: Any, start: Int[Tensor, "rows tokens"], length: int, never: list[int], seed: int
) -> Int[Tensor, "rows length"]:
    """Rows that the model has continued up to `length` tokens, sampled at temperature 1."""
    more = length - start.shape[1]
    if more < 1:
        raise ValueError(
            f"a stretch must have room after its first {start.shape[1]} tokens, got {length} "
            "tokens; give a larger --context, or a model with more positions"
        )
    start = start.to(model.device)
    as_it_is = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    with without_tokens(model, never), _seeded(model, seed):
        ids = model.generate(
            input_ids=start,
            attention_mask=torch.ones_like(start),
            min_new_tokens=more,
            max_new_tokens=more,
            do_sample=True,
            num_beams=1,
            pad_token_id=int(start[0, 0]),
            # Numbers that are none would end the process on a GPU. Moments refuse them later.
            remove_invalid_values=True,
            **as_it_is,
        )
    if ids.shape[1] != length:
        raise ValueError(
            f"a model must write stretches of {length} tokens, got {ids.shape[1]} from "
            f"{model.config.model_type!r}; give a smaller --context, or a text: --task text.txt"
        )
    return ids


@contextmanager
def _seeded(model: Any, seed: int) -> Iterator[None]:
    """Give the devices of a model random states of `seed`; their own come back at the end."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
