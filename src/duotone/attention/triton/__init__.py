"""Decode attention in Triton, on any GPU and in its interpreter: `decode` is the entry point."""
