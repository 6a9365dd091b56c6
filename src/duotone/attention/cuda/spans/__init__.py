"""Spans with one scale per channel: their layout, packing, decoding and score calibration."""
