"""ANLS, the score of DocVQA."""

from collections.abc import Sequence

from .score import Score, check_aligned

THRESHOLD = 0.5


def levenshtein(a: str, b: str) -> int:
    """Least number of insertions, deletions and substitutions of characters from a to b."""
    if len(a) < len(b):
        a, b = b, a
    previous = list(range(len(b) + 1))
    for i, char_a in enumerate(a, start=1):
        current = [i]
        for j, char_b in enumerate(b, start=1):
            substitution = previous[j - 1] + (char_a != char_b)
            current.append(min(previous[j] + 1, current[j - 1] + 1, substitution))
        previous = current
    return previous[-1]


def _normalise(text: str) -> str:
    """Lower case, outer space removed, inner runs of space made one (as the RRC server does)."""
    return " ".join(text.lower().split())


def normalised_levenshtein(a: str, b: str) -> float:
    """NL(a, b) = levenshtein / max(len a, len b) after normalisation; 0 for two empty texts."""
    a, b = _normalise(a), _normalise(b)
    longest = max(len(a), len(b))
    return levenshtein(a, b) / longest if longest else 0.0


def anls_of_answer(prediction: str, references: Sequence[str], threshold: float = THRESHOLD):
    """max_j s(a_j, o), s = 1 - NL if NL < threshold else 0 (Biten et al. 2019, eq. 1; DocVQA).

    The public evaluation server keeps an answer with NL exactly at the threshold; the papers, and
    we, do not.
    """
    if not references:
        raise ValueError(
            "ANLS needs at least one reference answer per question, got none; "
            "drop the question or give its answers"
        )
    distance = min(normalised_levenshtein(prediction, reference) for reference in references)
    return 1.0 - distance if distance < threshold else 0.0


def anls(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    threshold: float = THRESHOLD,
) -> Score:
    """Average normalised Levenshtein similarity: the mean of `anls_of_answer` over questions."""
    check_aligned(predictions, references)
    return Score.mean(
        [anls_of_answer(p, r, threshold) for p, r in zip(predictions, references, strict=True)]
    )
