"""LongBench's metrics (Bai et al. 2024, arXiv 2308.14508): the best score over the references.

All are in 0..1; the papers print them times 100.
"""

import importlib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from .score import Score, check_aligned

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_COMMENT_MARKS = ("`", "#", "//")


def best_of(
    metric: Callable[[str, str], float],
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
) -> Score:
    """Mean over samples of the best metric(prediction, reference)."""
    check_aligned(predictions, references)
    pairs = zip(predictions, references, strict=True)
    return Score.mean([max(metric(text, answer) for answer in answers) for text, answers in pairs])


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of the words in common, without case, punctuation and articles (SQuAD's)."""
    words, expected = _words(prediction), _words(reference)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected)) if common else 0.0


def rouge_l() -> Callable[[str, str], float]:
    """ROUGE-L F of the package `rouge`; an empty text scores 0."""
    try:
        rouge = importlib.import_module("rouge").Rouge(metrics=["rouge-l"], stats=["f"])
    except ImportError as error:
        raise ImportError(
            "LongBench's ROUGE-L needs the package rouge, which is not installed; "
            "install it with: pip install 'duotone[eval]'"
        ) from error

    def f_score(prediction: str, reference: str) -> float:
        if not prediction.strip(" .\n\t") or not reference.strip(" .\n\t"):
            return 0.0
        return rouge.get_scores(prediction, reference)[0]["rouge-l"]["f"]

    return f_score


def count_share(prediction: str, reference: str) -> float:
    """Share of the numbers in the prediction that are the reference."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference.strip()) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str) -> float:
    """Likeness of the first line of code to the reference, in steps of 0.01.

    2 * matching characters / characters of both (difflib's, which fuzzywuzzy uses where no
    python-Levenshtein is). Lines with `, # or // do not count as code.
    """
    lines = (line for line in prediction.split("\n") if line.strip())
    code = next((line for line in lines if not any(m in line for m in _COMMENT_MARKS)), "")
    return round(100 * SequenceMatcher(None, code, reference).ratio()) / 100


def class_share(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (classes that the prediction names) if the right one is among them, else 0.

    Names that are part of the right name do not count. (The original skips one of two such names
    in a row; we do not.)
    """
    named = [c for c in classes if c in prediction and (c == reference or c not in reference)]
    return 1 / len(named) if reference in named else 0.0


def class_scores(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    classes: Sequence[Sequence[str]],
) -> Score:
    """Mean of the best `class_share`; `classes`: all class names, per sample."""
    check_aligned(predictions, references)
    rows = zip(predictions, references, classes, strict=True)
    return Score.mean(
        [max(class_share(text, a, names) for a in right) for text, right, names in rows]
    )
