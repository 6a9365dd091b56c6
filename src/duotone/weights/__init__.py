"""Weights and activations on few bits: transforms, calibration, static scales, linear kernels."""
