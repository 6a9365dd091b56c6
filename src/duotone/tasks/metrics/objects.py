"""Precision and recall of a caption's named objects against the objects of the scene."""

import re
from collections.abc import Collection, Sequence

import numpy as np

from .score import Score, check_aligned


def _pattern(vocabulary: Collection[str]) -> re.Pattern:
    """Any name of the vocabulary as a whole word, with a plural s, longer names first."""
    names = sorted(vocabulary, key=len, reverse=True)
    return re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")(?:s|es)?\b")


def named_objects(caption: str, pattern: re.Pattern) -> set[str]:
    """The names found in a caption; 'two red balls' names 'red ball'."""
    return set(pattern.findall(" ".join(caption.lower().split())))


def object_scores(captions: Sequence[str], objects: Sequence[Collection[str]]) -> dict[str, Score]:
    """Micro-averaged `object_precision` and `object_recall` of the objects the captions name.

    precision = |named and there| / |named|, recall = |named and there| / |there|, sums over all
    samples; an object counts once per caption. Only names that occur in some scene of the set are
    looked for, so a name foreign to all scenes is not a mistake here.
    """
    check_aligned(captions, objects)
    vocabulary = {name.lower() for names in objects for name in names}
    if not vocabulary:
        raise ValueError(
            "object scores need the names of the objects in each scene, got none in any; "
            "use another metric for pictures without object lists"
        )
    pattern = _pattern(vocabulary)
    rows = []
    for caption, names in zip(captions, objects, strict=True):
        there, named = {name.lower() for name in names}, named_objects(caption, pattern)
        rows.append([len(there & named), len(named), len(there)])
    counts = np.asarray(rows, dtype=np.float64)  # [samples, (hits, named, there)]
    return {"object_precision": Score(counts[:, [0, 1]]), "object_recall": Score(counts[:, [0, 2]])}
