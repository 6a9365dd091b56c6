"""Evaluation: tasks through schemes, with scores, agreement with 16 bit, bytes and intervals."""

from .loop import REFERENCE, Evaluation, Settings, evaluate, resolve_schemes

__all__ = ["REFERENCE", "Evaluation", "Settings", "evaluate", "resolve_schemes"]
