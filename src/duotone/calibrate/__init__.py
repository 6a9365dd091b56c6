"""`duotone calibrate`: bases for K and V from a model's own statistics, and a spec of them."""

from .data import CalibrationData, calibration_data
from .moments import CalibrationBatch, LayerMoments, gather_moments
from .run import calibrate, check_files, partial_of, write
from .settings import Settings
from .transform import allocate, klt

__all__ = [
    "CalibrationBatch",
    "CalibrationData",
    "LayerMoments",
    "Settings",
    "allocate",
    "calibrate",
    "calibration_data",
    "check_files",
    "gather_moments",
    "klt",
    "partial_of",
    "write",
]
