"""`duotone calibrate`: bases for K and V from a model's own statistics, and a spec of them."""

from .compared import compare
from .data import CalibrationData, calibration_data
from .files import check_files, write
from .moments import CalibrationBatch, LayerMoments, gather_moments
from .one_call import calibrated
from .run import calibrate
from .settings import Settings
from .text import joined, written_data
from .transform import allocate, klt
from .written import Written

__all__ = [
    "CalibrationBatch",
    "CalibrationData",
    "LayerMoments",
    "Settings",
    "Written",
    "allocate",
    "calibrate",
    "calibrated",
    "calibration_data",
    "check_files",
    "compare",
    "gather_moments",
    "joined",
    "klt",
    "write",
    "written_data",
]
