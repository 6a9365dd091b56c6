"""Requests that a served model holds for each in 16 bit, worked out before it serves any.

Blocks of all layers have equal bytes. A state of a linear layer takes a block, and so may make
blocks so long that short requests gain nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Tokens of a block in 16 bit, where no state makes it longer.
BLOCK_TOKENS_16 = 16
LENGTHS = (1024, 8192, 32768)
# A gain below this is none.
LEAST_GAIN = 1.1


@dataclass(frozen=True)
class Paged:
    """Layers with pages of one width. block: tokens. rings: blocks of a layer's ring."""

    layers: int
    block: int
    rings: int


@dataclass(frozen=True)
class Layers:
    """Layers of a model, or of a rank of it, by kind.

    paged: with pages of few bits, by width. page_bytes: of a block of a layer. kept: full attention
    in 16 bit. windows: of layers in 16 bit. states: layers with a state of at most `state_bytes`.
    token_bytes: of K and V of a token in 16 bit, all heads.
    """

    paged: tuple[Paged, ...]
    page_bytes: int
    token_bytes: int
    kept: int = 0
    windows: tuple[int, ...] = ()
    states: int = 0
    state_bytes: int = 0

    def gain(self, length: int) -> float:
        """Times as many requests of `length` tokens as in 16 bit."""
        pages = [(x.layers, -(-length // x.block)) for x in self.paged]
        rings = [(x.layers, 1) for x in self.paged for _ in range(x.rings)]
        own = max(1, self.page_bytes // self.token_bytes)
        ours = _counted(pages + rings + self._in_16_bit(length, own, self.kept))
        size = max(BLOCK_TOKENS_16, -(-self.state_bytes // self.token_bytes))
        size = -(-size // BLOCK_TOKENS_16) * BLOCK_TOKENS_16
        full = self.kept + sum(x.layers for x in self.paged)
        before = _counted(self._in_16_bit(length, size, full)) * size * self.token_bytes
        return before / (ours * self.page_bytes)

    def _in_16_bit(self, length: int, size: int, full: int) -> list[tuple[int, int]]:
        """Kinds of layers in 16 bit, and blocks of a request in each. size: tokens of a block."""
        windows = Counter(self.windows).items()
        seen = [(layers, -(-min(length, x + size) // size)) for x, layers in windows]
        return [(full, -(-length // size)), *seen, (self.states, 1)]


def _counted(kinds: Sequence[tuple[int, int]]) -> int:
    """Blocks of a request in all layers. kinds: layers, and blocks in each of them.

    vLLM makes groups of equally many layers, as many as the smallest kind has, or the largest if
    that is less than half as many more; groups that are not full take as much memory.
    """
    counts = [layers for layers, _ in kinds if layers]
    least, most = min(counts), max(counts)
    each = most if most < 1.5 * least else least
    return sum(-(-layers // each) * each * blocks for layers, blocks in kinds)


def said(layers: Layers, most: int) -> tuple[str, bool]:
    """A sentence on blocks and the requests held, and whether few bits gain nothing.

    most: tokens that a request may have.
    """
    lengths = [length for length in LENGTHS if length <= most] or [most]
    gains = [layers.gain(length) for length in lengths]
    parts = [f"{gain:.1f} at {length:,}" for gain, length in zip(gains, lengths, strict=True)]
    blocks = " and ".join(f"{block:,}" for block in sorted({x.block for x in layers.paged}))
    text = f"duotone: blocks of {blocks} tokens; requests held, times 16 bit: {', '.join(parts)}"
    return text, max(gains) < LEAST_GAIN
