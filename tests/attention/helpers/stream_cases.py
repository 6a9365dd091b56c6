"""Steps whose layers pack a stream of text in groups, next to pictures or without."""

import torch
from parts_cases import LAYERS, Prompt

import duotone
from duotone.quant import CacheSpec, KVSpec

from cases import SMALL, device

STREAMS = {
    f"{name}@{bits}, {recent} recent": duotone.scheme(f"duotone-{name}", bits=bits).replace(
        recent=recent
    )
    for name, bits, recent in (
        ("stream", 2, 96),
        ("stream", 4, 32),
        ("mixed", 2, 96),
        ("mixed", 4, 96),
        ("mixed", 4, 32),
    )
}
# Channels of unequal bits, as a calibration gives them to text.
STREAMS["classes, 32 recent"] = CacheSpec(
    visual="text",
    text=KVSpec(*(tensor.replace(group=64) for tensor in SMALL)),
    sink=4,
    recent=32,
)
# Prompts with so much text that groups leave the window.
NAMES = ("one", "ragged")
# Tokens of a step after a prompt; decode steps go on until groups leave the window.
STEPS = {"prompt": None, "later turn": 100, "decode steps": 1}


class Conversation(Prompt):
    """Layers of a prompt, or of a step that follows it."""

    def __init__(self, spec: CacheSpec, name: str, tokens: int | None) -> None:
        super().__init__(spec, name)
        if tokens is None:
            return
        self.apply(range(LAYERS))
        self.turn(tokens)
        while self.leaving is None:
            self.apply(range(LAYERS))
            self.turn(tokens)

    def turn(self, tokens: int) -> None:
        """Begin a step of so many tokens of text."""
        real = torch.ones(len(self.key), tokens, dtype=torch.bool, device=device())
        self.begin(~real, real)

    @property
    def leaving(self) -> list[int] | None:
        """Tokens of each sequence that leave the window in this step; None: no token does."""
        flush = self.plan.flush_first or self.plan.flush_last
        return None if flush is None else flush.piece.take.lengths.tolist()
