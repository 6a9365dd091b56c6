"""Spans whose channels have unequal bits: their layout, packing and decoding."""
