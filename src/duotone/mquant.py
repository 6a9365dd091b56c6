"""Former name of `duotone.quantize`."""

from duotone.quantize import CalibrationSet as CalibrationSet
from duotone.quantize import calibration_set as calibration_set
from duotone.quantize import check_disjoint as check_disjoint
from duotone.quantize import quantize_model as quantize_model
