"""Handles that `update()` of a static layer returns: no tensors, so a compiler sees through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from duotone.hf.static import StaticLayer


class StaticStates:
    """K or V of one layer: `new` are this step's states, the rest is in the layer.

    Another attention function fails on it by its type.
    """

    def __init__(self, layer: StaticLayer, new: Tensor) -> None:
        self.layer, self.new = layer, new

    @property
    def shape(self) -> torch.Size:
        """Shape of this step's states: a frozen cache has its length on the device."""
        return self.new.shape
