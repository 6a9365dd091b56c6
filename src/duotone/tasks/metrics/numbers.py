"""Exact match of the number an explanation ends with: GSM8K as lm-evaluation-harness scores it."""

import re
from collections.abc import Sequence

from .score import Score, check_aligned

# Task gsm8k_cot, version 3: the filters "strict-match" (first match) and "flexible-extract" (last
# match), then the characters that exact_match ignores. The harness's pattern ends in a dot that
# stands for any character. So an answer cut off right after its last digit loses that digit, there
# as here.
_STRICT = re.compile(r"The answer is (-?[0-9.,]+).")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_SOLUTION_MARK = "#### "
NO_NUMBER = "[invalid]"


def strict_number(text: str) -> str:
    """The number of the first 'The answer is N.'; NO_NUMBER without one."""
    found = _STRICT.search(text)
    return found.group(1) if found else NO_NUMBER


def flexible_number(text: str) -> str:
    """The last number in the text; NO_NUMBER without one."""
    found = _FLEXIBLE.findall(text)
    return found[-1] if found else NO_NUMBER


def comparable_number(text: str) -> str:
    """Text without commas, dollar signs, a closing period and all before '#### '."""
    number = text.replace(",", "").replace("$", "").rpartition(_SOLUTION_MARK)[2]
    return number.removesuffix(".").lower()


def number_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict:
    """{'exact_match_strict', 'exact_match_flexible'}: shares of answers with the right number."""
    check_aligned(predictions, references)

    def share(extract) -> Score:
        found = [comparable_number(extract(text)) for text in predictions]
        right = [{comparable_number(r) for r in answers} for answers in references]
        return Score.mean([float(f in r) for f, r in zip(found, right, strict=True)])

    return {
        "exact_match_strict": share(strict_number),
        "exact_match_flexible": share(flexible_number),
    }
