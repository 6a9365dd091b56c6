"""Passages of text for perplexity. Text benchmarks are lm-eval's (docs/evaluating.md)."""

from .passages import Passages, read_passages

__all__ = ["Passages", "read_passages"]
