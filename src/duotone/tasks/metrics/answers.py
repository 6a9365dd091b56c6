"""Exact-match accuracy of short answers."""

import unicodedata
from collections.abc import Sequence

from .score import Score, check_aligned

_ARTICLES = ("a ", "an ", "the ")


def normalise_answer(text: str) -> str:
    """The form in which answers are compared.

    Unicode NFKC, case folded, runs of white space made one, surrounding quotes and closing
    punctuation (. , ! ? ; :) removed, one leading article removed. Digits, signs, inner
    punctuation and number words stay: '$12.50' is not '12.5' and 'two' is not '2'.
    """
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    text = text.strip("\"'\u201c\u201d\u2018\u2019 ").rstrip(".,!?;: ")
    for article in _ARTICLES:
        if text.startswith(article):
            return text[len(article) :]
    return text


def accuracy(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """Share of predictions equal, after `normalise_answer`, to one of their references."""
    check_aligned(predictions, references)
    return Score.mean(
        [
            float(normalise_answer(prediction) in {normalise_answer(r) for r in answers})
            for prediction, answers in zip(predictions, references, strict=True)
        ]
    )
