"""Rotations by the matrix of a kv head: queries before decoding, outputs after it."""
