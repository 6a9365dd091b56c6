"""Evaluation: tasks and perplexity through schemes, with scores, bytes and intervals."""

from .loop import Evaluation, Settings, evaluate
from .perplexity import evaluate_perplexity
from .records import REFERENCE, resolve_schemes

__all__ = [
    "REFERENCE",
    "Evaluation",
    "Settings",
    "evaluate",
    "evaluate_perplexity",
    "resolve_schemes",
]
