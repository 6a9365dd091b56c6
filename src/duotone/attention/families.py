"""Kernel families and the choices of a `TensorSpec` that each honours, in one table.

A family also has rules of shapes and combinations (`spans.layout`, `classes.layout`,
`groups.format`, `triton.decode`). A new field passes none of these families until it is named here.
"""

from __future__ import annotations

from duotone.quant.honours import Honours

# Records of the CUDA decode kernels.
SPANS = Honours.of("span records", {"bits", "group", "transform"}, (1, 2, 4, 8))
CLASSES = Honours.of("class records", {"bits", "group", "classes", "transform"}, (4, 2, 1))
GROUPS = Honours.of("group records", {"bits", "along", "group", "mapping", "transform"}, (1, 2, 4))
# Kernels that quantize dense K and V straight into records.
SPAN_PACKER = Honours.of("packing kernels of spans", {"bits", "group", "shrink"}, SPANS.bits, True)
GROUP_PACKER = Honours.of(
    "packing kernels of groups",
    {"bits", "along", "group", "mapping", "hybrid_at", "shrink", "eta"},
    GROUPS.bits,
    True,
)
# Their levels come from `LEVEL_SEARCH`, or from PyTorch operations.
CLASS_PACKER = Honours.of(
    "packing kernels of classes",
    CLASSES.honours | {"eta", "shrink", "levels", "gain", "energy"},
    CLASSES.bits,
    True,
)
LEVEL_SEARCH = Honours.of(
    "kernels that find levels", CLASS_PACKER.honours - {"eta"}, CLASSES.bits, True
)
TRITON = Honours.of(
    "Triton kernels",
    {"bits", "along", "group", "mapping", "classes", "transform", "param_dtype"},
    (8, 4, 2, 1),
)
