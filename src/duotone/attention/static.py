"""One decode step over all layers of a frozen cache, without waiting for the host.

A step flushes the groups that are due and makes room for one token. Then, layer by layer, it writes
the token's K and V and attends. Steps can be eager or captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duotone.attention.cuda.shared.runtime import has_kernels, is_untried
from duotone.attention.dispatch import decode_attention
from duotone.cache import StaticStore, flush_all
from duotone.quant.autocast import without_autocast
from duotone.tools.slow_paths import SlowPaths


class StaticDecoder:
    """Stores of all layers, and the attention to them.

    stores: one per layer. tau, impl, slow: arguments of `decode_attention`.
    """

    def __init__(
        self,
        stores: Sequence[StaticStore],
        tau: tuple[float, float] | None,
        impl: str = "auto",
        slow: SlowPaths | None = None,
    ) -> None:
        self.stores, self.tau, self.impl, self.slow = list(stores), tau, impl, slow
        device = self.stores[0].key.device
        tried = impl == "cuda" or (impl == "auto" and not is_untried(device))
        self.kernels = tried and has_kernels(device)
        self.steps = 0  # so far
        self.places = list({id(s.places): s.places for s in self.stores}.values())
        self.room = min(places.new_tokens for places in self.places)
        if self.kernels:
            _prepare(device)

    @property
    def has_stream(self) -> bool:
        """True where some tokens will leave the window."""
        return any(store.stream is not None for store in self.stores)

    def is_due(self, step: int) -> bool:
        """True where step `step` since freezing (from 0) starts with a flush; never waits."""
        return any(places.is_due(step) for places in self.places)

    def flush(self) -> None:
        """Move groups to the stream at sequences where they are due."""
        flush_all(self.stores)

    def starts_with_flush(self) -> bool:
        """True where groups leave the window before the next step's `advance`.

        The host decides and counts `steps`, the device advances.
        Errors: ValueError for a step beyond the buffers' room.
        """
        if self.steps >= self.room:
            raise ValueError(
                f"fixed buffers take as many tokens after the prompt as they have room for, "
                f"{self.room} per sequence; got one more. Hold the cache still with more room, or "
                "let it grow."
            )
        return self.has_stream and self.is_due(self.steps)

    def advance(self) -> None:
        """Make room for one token per sequence, in all layers."""
        for places in self.places:
            places.advance()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
    ) -> Tensor:
        """Store one layer's K and V, [batch, kv_heads, 1, channels], and attend to all tokens.

        query: [batch, q_heads, 1, head_dim]. Returns [batch, q_heads, 1, value_dim].
        """
        store = self.stores[layer]
        # Under autocast states come in other types than those of the prompt.
        typed, key, value = (x.to(store.dtype) for x in (query, key, value))
        given = {"tau": self.tau, "impl": self.impl, "slow": self.slow}
        with without_autocast(query.device):
            self._write(store, key, value)
            out = decode_attention(typed, store.segments, sm_scale=sm_scale, **given)
        return out.to(query.dtype)

    def _write(self, store: StaticStore, key: Tensor, value: Tensor) -> None:
        """Write as `StaticStore.write` does, in one launch where a kernel can."""
        if self.kernels:
            from duotone.attention.cuda.dense.window_append import appends, window_append

            new, windows = (key, value), (store.key, store.value)
            if appends(new, windows):
                window_append(new, windows, store.places.at)
                return
        store.write(key, value)


def _prepare(device: torch.device) -> None:
    from duotone.attention.cuda.shared.counters import prepare

    prepare(device)
