"""Caption tokenization in Python, close to coco-caption's, which needs Java."""

import re
from collections.abc import Sequence

NAME = "python"  # of this tokenization, in results
_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+(?:-\w+)*(?=n't)|n't|'\w+|\w+(?:-\w+)*|\$|%|&")


def tokenize(sentences: Sequence[str]) -> list[str]:
    """Words of each sentence, lower case, separated by single spaces, punctuation dropped.

    Agrees with the PTB tokenizer on plain prose (letters, numbers, hyphenated words, n't and 's).
    The PTB tokenizer's special cases (abbreviations with periods, URLs, fractions, brackets) are
    missing. Our own generated captions are plain prose.
    """
    return [" ".join(_WORD.findall(sentence.lower())) for sentence in sentences]
