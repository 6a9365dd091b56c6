"""Gates between attention and its output projection, heard on their way.

No family's names are needed: a gate is what the projection is given over what attention made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

Outputs = Float[Tensor, "batch tokens heads head_dim"]
Heard = Callable[[int, Outputs], None]


class Gates:
    """Passes the gates of attention layers to `heard`: (layer_idx, gates); layers without: none."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard
        self.made: dict[int, Outputs] = {}

    def attended(self, module: nn.Module, output: Any) -> None:
        """Take what attention has made."""
        self.made[module.layer_idx] = output

    @contextmanager
    def watching(self, projections: dict[int, nn.Module]) -> Iterator[None]:
        """Watch output projections by layer_idx. Undone at the end, come what may."""
        with ExitStack() as stack:
            for number, projection in projections.items():
                stack.callback(projection.register_forward_pre_hook(self._given(number)).remove)
            yield

    def _given(self, number: int) -> Callable[[nn.Module, tuple], None]:
        def given(projection: nn.Module, args: tuple) -> None:
            made = self.made.pop(number, None)
            if made is None or not args or args[0].numel() != made.numel():
                return
            taken = args[0].reshape(made.shape)
            if not torch.equal(taken, made):
                self.heard(number, torch.where(made == 0, 0, taken / made))

        return given
