"""The quantized cache: its timeline, its layers, and the attention that reads them."""
