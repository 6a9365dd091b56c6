"""Prompts that are tensors or a text already: embeddings, token ids, stretches of a file.

A task's examples go through a chat template. What a model reads otherwise, such as embeddings of
features that its config has no placeholders for, comes as tensors under a task's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duotone.inference.prompts import encoder_of
from duotone.tools.tensor_file import damage_named

EMBEDS, IDS, VISUAL = "inputs_embeds", "input_ids", "visual_mask"
ANSWER_TOKENS = 64
CONTEXT = 1024


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts as tensors, under a task's name.

    prompts: each has inputs_embeds [tokens, hidden] or input_ids [tokens], and may have visual_mask
    [tokens], True at visual tokens. max_new_tokens: of an answer. never: tokens that answers do not
    have; with some, answers have no end.
    """

    name: str
    prompts: tuple[Mapping[str, Tensor], ...]
    max_new_tokens: int = ANSWER_TOKENS
    never: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        kinds = set()
        for number, prompt in enumerate(self.prompts):
            _check_prompt(prompt, f"prompt {number} of {self.name!r}")
            kinds.add(frozenset(prompt))
        if len(kinds) != 1:
            raise ValueError(
                f"{self.name!r} must have prompts, all with the same tensors, got "
                f"{sorted(map(sorted, kinds))}"
            )

    @property
    def size(self) -> int:
        """Number of prompts."""
        return len(self.prompts)

    @property
    def fingerprint(self) -> str:
        """Ten characters that change with the prompts."""
        return _digest([self.key(number) for number in range(self.size)])[:10]

    def key(self, number: int) -> str:
        """Digest of a prompt's visual tokens, or of all its tokens where there are none."""
        prompt = self.prompts[number]
        tokens = prompt[EMBEDS if EMBEDS in prompt else IDS]
        visual = prompt.get(VISUAL)
        if visual is not None and EMBEDS in prompt and visual.any():
            tokens = tokens[visual.bool()]
        return _digest([tokens.detach().float().cpu().contiguous().numpy().tobytes()])

    def check_samples(self, samples: int) -> None:
        """Raise ValueError unless there are that many prompts."""
        if not 1 <= samples <= self.size:
            raise ValueError(
                f"samples must be between 1 and the {self.size} prompts of {self.name!r}, got "
                f"{samples}; give fewer, or more data"
            )

    def part(self, numbers: Sequence[int]) -> EncodedPrompts:
        """Prompts of these numbers."""
        return replace(self, prompts=tuple(self.prompts[number] for number in numbers))

    def batches(self, samples: int, batch_size: int) -> list[dict[str, Tensor]]:
        """Left-padded batches of the first prompts on the CPU, [B, tokens, ...], with a mask."""
        first = self.prompts[:samples]
        return [
            _padded(first[start : start + batch_size]) for start in range(0, len(first), batch_size)
        ]

    @classmethod
    def load(cls, path: str | Path, max_new_tokens: int = ANSWER_TOKENS) -> EncodedPrompts:
        """Read a safetensors file of "0.inputs_embeds", "0.visual_mask", "1.inputs_embeds", ...

        Errors: ValueError for other files and other names.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        rule = f'{path} must be a safetensors file of tensors "0.{EMBEDS}", "0.{VISUAL}", ...'
        with damage_named(rule, SafetensorError):
            tensors = load_file(path)
            prompts: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                number, _, field = name.partition(".")
                prompts.setdefault(int(number), {})[field] = tensor
            numbered = tuple(prompts[number] for number in sorted(prompts))
        return cls(Path(path).stem, numbered, max_new_tokens)


def _check_prompt(prompt: Mapping[str, Tensor], where: str) -> None:
    dimensions = {EMBEDS: 2, IDS: 1, VISUAL: 1}
    main = [name for name in (EMBEDS, IDS) if name in prompt]
    ok = len(main) == 1 and set(prompt) <= set(dimensions)
    ok = ok and all(tensor.dim() == dimensions[name] for name, tensor in prompt.items())
    if not (ok and len({len(tensor) for tensor in prompt.values()}) == 1):
        raise ValueError(
            f"a prompt has {EMBEDS} [tokens, hidden] or {IDS} [tokens], and may have {VISUAL} "
            f"[tokens]; got { {name: tuple(t.shape) for name, t in prompt.items()} } in {where}"
        )


def _digest(parts: Sequence[bytes | str]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else part.encode())
    return found.hexdigest()[:16]


def _padded(prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(next(iter(prompt.values()))) for prompt in prompts)

    def left(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu()
        missing = tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])
        return torch.cat([missing, tensor])

    made = {name: torch.stack([left(p[name]) for p in prompts]) for name in prompts[0]}
    real = [left(torch.ones(len(next(iter(p.values()))), dtype=torch.long)) for p in prompts]
    return made | {"attention_mask": torch.stack(real)}


@dataclass(frozen=True)
class TextFile:
    """A text to cut into stretches of `context` tokens, once a model's tokenizer is there."""

    name: str
    text: str
    context: int = CONTEXT
    max_new_tokens: int = ANSWER_TOKENS

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"context must be >= 1 token, got {self.context}")

    def check_samples(self, samples: int) -> None:
        """Raise ValueError for no samples; how many there are depends on the tokenizer."""
        if samples < 1:
            raise ValueError(f"samples must be between 1 and the text's stretches, got {samples}")

    def encoded(self, loaded: Any) -> EncodedPrompts:
        """Stretches as token ids; a rest shorter than `context` is left out.

        No stretch is longer than the model's positions allow. Errors: ValueError for a text
        shorter than one stretch.
        """
        context = longest_stretch(loaded.model, self.context, self.max_new_tokens)
        ids = torch.tensor(encoder_of(loaded.processor)(self.text), dtype=torch.long)
        stretches = [part for part in ids.split(context) if len(part) == context]
        if not stretches:
            raise ValueError(
                f"{self.name!r} must have a stretch of {context} tokens, got {len(ids)} tokens; "
                "give a longer text, or a smaller --context"
            )
        prompts = tuple({IDS: part} for part in stretches)
        return EncodedPrompts(self.name, prompts, self.max_new_tokens)


def longest_stretch(model: Any, context: int, answer_tokens: int) -> int:
    """`context` tokens, or as many as the model's positions allow before an answer."""
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    return context if most is None else min(context, max(1, most - answer_tokens))


def encoded_if_text(loaded: Any, task: Any) -> Any:
    """A text file's stretches; any other task as it is."""
    return task.encoded(loaded) if isinstance(task, TextFile) else task
