"""`duotone inspect`: what calibrated bases promise a model, what schemes do to its attention."""

from .errors import Schemes, measure_errors
from .layers import layer_rows, total_row
from .run import check_folder_is_new, inspect_model, write_report

__all__ = [
    "Schemes",
    "check_folder_is_new",
    "inspect_model",
    "layer_rows",
    "measure_errors",
    "total_row",
    "write_report",
]
