"""`duotone inspect`: spectra of K and V by layer, and expected gains of calibrated bases."""

from .layers import layer_rows, total_row
from .run import check_folder_is_new, inspect_model, write_report

__all__ = [
    "check_folder_is_new",
    "inspect_model",
    "layer_rows",
    "total_row",
    "write_report",
]
