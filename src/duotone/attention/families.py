"""All families of decode kernels, in order of preference."""

from __future__ import annotations

from duotone.attention.cuda.classes.family import CLASSES
from duotone.attention.cuda.dense.family import DENSE
from duotone.attention.cuda.groups.family import GROUPS
from duotone.attention.cuda.short.family import SHORT
from duotone.attention.cuda.spans.family import SPANS
from duotone.attention.torch_family import TORCH
from duotone.attention.triton.family import TRITON

FAMILIES = (SPANS, CLASSES, GROUPS, DENSE, SHORT, TRITON, TORCH)
