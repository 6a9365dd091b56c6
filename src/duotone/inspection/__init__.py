"""`duotone inspect`: what calibrated bases promise a model, what schemes do to its attention."""

from .errors import ErrorMeter, Schemes
from .layers import layer_rows, total_row
from .run import check_folder_is_new, inspect_model, write_report

__all__ = [
    "ErrorMeter",
    "Schemes",
    "check_folder_is_new",
    "inspect_model",
    "layer_rows",
    "total_row",
    "write_report",
]
