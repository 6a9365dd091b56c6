"""Requests that a served model holds for each in 16 bit, worked out before it serves any.

Blocks of all layers have equal bytes. A state of a linear layer takes a block, and so may make
blocks so long that short requests gain nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

# Tokens of a block in 16 bit, where no state makes it longer.
BLOCK_TOKENS_16 = 16
LENGTHS = (1024, 8192, 32768)
# A gain below this is none.
LEAST_GAIN = 1.1


@dataclass(frozen=True)
class Layers:
    """Layers of a model by kind.

    paged: with pages of few bits. kept: full attention in 16 bit. windows: of layers in 16 bit.
    states: layers with a state of at most `state_bytes`. token_bytes: of K and V of a token in 16
    bit, all heads.
    """

    paged: int
    kept: int
    windows: tuple[int, ...]
    states: int
    state_bytes: int
    token_bytes: int

    def gain(self, length: int, block: int, page_bytes: int, rings: int) -> float:
        """Times as many requests of `length` tokens as in 16 bit.

        block: tokens of a block of pages, which has page_bytes. rings: blocks of a layer's ring.
        """
        own = max(1, page_bytes // self.token_bytes)
        blocks = self.paged * (-(-length // block) + rings) + self._blocks_16(
            length, own, self.kept
        )
        size = max(BLOCK_TOKENS_16, -(-self.state_bytes // self.token_bytes))
        size = -(-size // BLOCK_TOKENS_16) * BLOCK_TOKENS_16
        before = self._blocks_16(length, size, self.paged + self.kept) * size * self.token_bytes
        return before / (blocks * page_bytes)

    def _blocks_16(self, length: int, size: int, full: int) -> int:
        windows = (min(length, window + size) for window in self.windows)
        return full * -(-length // size) + sum(-(-x // size) for x in windows) + self.states


def said(layers: Layers, block: int, page_bytes: int, rings: int, most: int) -> tuple[str, bool]:
    """A sentence on the block and the requests held, and whether few bits gain nothing.

    most: tokens that a request may have.
    """
    lengths = [length for length in LENGTHS if length <= most] or [most]
    gains = [layers.gain(length, block, page_bytes, rings) for length in lengths]
    parts = [f"{gain:.1f} at {length:,}" for gain, length in zip(gains, lengths, strict=True)]
    text = f"duotone: blocks of {block:,} tokens; requests held, times 16 bit: {', '.join(parts)}"
    return text, max(gains) < LEAST_GAIN
