"""`duotone inspect`: expected gains of calibrated bases, and errors of schemes in attention."""

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
