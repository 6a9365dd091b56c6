"""Decode attention in Triton, on any GPU and in Triton's interpreter: `decode` is the door."""
