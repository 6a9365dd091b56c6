"""Quantization of a multimodal model's weights and activations, layer by layer (MQuant).

recipe = duotone.weights.get_recipe("mquant-w4a8")
calibration = calibration_set(loaded, tasks, samples=32)
report = quantize_model(loaded.model, recipe, calibration)
duotone.hf.weights.checkpoint.save(loaded.model, "quantized", loaded.processor)
"""

from __future__ import annotations

from .calibration import CalibrationSet as CalibrationSet
from .calibration import calibration_set as calibration_set
from .disjoint import check_disjoint as check_disjoint
from .run import quantize_model as quantize_model
