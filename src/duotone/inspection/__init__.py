"""`duotone inspect`: spectra of K and V by layer, and expected gains of calibrated bases."""

from .layers import layer_rows, total_row
from .run import inspect_model

__all__ = ["inspect_model", "layer_rows", "total_row"]
