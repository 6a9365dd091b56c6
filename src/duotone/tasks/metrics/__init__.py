"""Metrics over texts: predictions and references in, resampleable scores out.

Knows neither models nor tasks; pycocoevalcap, sacrebleu and rouge are imported where they score.
"""

from .anls import anls
from .answers import accuracy, normalise_answer
from .captions import caption_scores, tokenizer_name
from .intervals import Interval, confidence_interval, paired_difference
from .longbench import best_of, class_scores, code_similarity, count_share, qa_f1, rouge_l
from .numbers import number_scores
from .objects import object_scores
from .score import Score
from .truthful import truthful_scores

__all__ = [
    "Interval",
    "Score",
    "accuracy",
    "anls",
    "best_of",
    "caption_scores",
    "class_scores",
    "code_similarity",
    "confidence_interval",
    "count_share",
    "normalise_answer",
    "number_scores",
    "object_scores",
    "paired_difference",
    "qa_f1",
    "rouge_l",
    "tokenizer_name",
    "truthful_scores",
]
