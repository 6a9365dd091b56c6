"""Streams with a scale per group (KIVI, InnerQ): their layout, packing and decoding."""
