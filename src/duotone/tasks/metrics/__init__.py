"""Metrics over texts: predictions and references in, resampleable scores out.

Knows neither models nor tasks; pycocoevalcap is imported where it scores.
"""

from .anls import anls
from .answers import accuracy, normalise_answer
from .captions import caption_scores, need_pycocoevalcap
from .intervals import Interval, confidence_interval, paired_difference, paired_ratio
from .objects import object_scores
from .score import Score

__all__ = [
    "Interval",
    "Score",
    "accuracy",
    "anls",
    "caption_scores",
    "confidence_interval",
    "need_pycocoevalcap",
    "normalise_answer",
    "object_scores",
    "paired_difference",
    "paired_ratio",
]
