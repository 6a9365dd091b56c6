"""Modules of a quantized model, and the doors to the kernels that they run."""
