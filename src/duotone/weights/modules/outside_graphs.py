"""Forward passes that torch.compile runs as they are, between two graphs.

Kernels are chosen and launched in Python, from caches and in launches that overlap: a compiler
cannot trace that.
"""

from __future__ import annotations

from functools import partial

import torch

# Decorator; takes the host 2 us per call.
outside_graphs = partial(
    torch.compiler.disable, reason="a kernel of duotone is chosen and launched in Python"
)
