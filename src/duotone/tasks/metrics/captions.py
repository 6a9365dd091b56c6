"""Caption metrics of coco-caption through pycocoevalcap: BLEU, ROUGE-L and CIDEr.

pycocoevalcap is imported on use.
"""

import importlib
from collections.abc import Sequence

import numpy as np

from .score import Score, check_aligned
from .tokenizer import tokenize

Texts = dict[int, list[str]]
BLEU_ORDER = 4


def _pycocoevalcap(module: str):
    try:
        return importlib.import_module(f"pycocoevalcap.{module}")
    except ImportError as error:
        raise ImportError(
            "caption metrics need pycocoevalcap, which is not installed; "
            "install it with: pip install 'duotone[eval]'"
        ) from error


def need_pycocoevalcap() -> None:
    """Import all that caption metrics use. Errors: ImportError that names the remedy."""
    for module in ("bleu.bleu_scorer", "cider.cider", "rouge.rouge"):
        _pycocoevalcap(module)


def _by_sample(predictions: Sequence[str], references: Sequence[Sequence[str]], tokenized: bool):
    """Tokens of all texts in one run -> (references by sample, predictions by sample)."""
    flat = list(predictions) + [text for texts in references for text in texts]
    tokens = iter(flat if tokenized else tokenize(flat))
    hypotheses = {i: [next(tokens)] for i in range(len(predictions))}
    return {i: [next(tokens) for _ in texts] for i, texts in enumerate(references)}, hypotheses


def _bleu_from_counts(order: int):
    """Corpus BLEU-`order` from summed (hypothesis words, reference words, guesses x4, correct x4).

    Same constants as coco-caption's scorer: the values agree to rounding.
    """
    tiny, small = 1e-15, 1e-9

    def combine(sums: np.ndarray) -> np.ndarray:
        guesses, correct = sums[..., 2 : 2 + BLEU_ORDER], sums[..., 2 + BLEU_ORDER :]
        precisions = (correct[..., :order] + tiny) / (guesses[..., :order] + small)
        length_ratio = (sums[..., 0] + tiny) / (sums[..., 1] + small)
        penalty = np.exp(np.minimum(0.0, 1.0 - 1.0 / np.maximum(length_ratio, tiny)))
        return penalty * np.prod(precisions, axis=-1) ** (1.0 / order)

    return combine


def _closest_length(reference_lengths: Sequence[int], length: int) -> int:
    return min((abs(reference - length), reference) for reference in reference_lengths)[1]


def _bleu(gts: Texts, res: Texts) -> dict[str, Score]:
    bleu = _pycocoevalcap("bleu.bleu_scorer")
    rows = []
    for i, (hypothesis,) in res.items():
        counts = bleu.cook_test(hypothesis, bleu.cook_refs(gts[i], n=BLEU_ORDER), n=BLEU_ORDER)
        closest = _closest_length(counts["reflen"], counts["testlen"])
        rows.append([counts["testlen"], closest, *counts["guess"], *counts["correct"]])
    statistics = np.asarray(rows, dtype=np.float64)
    orders = range(1, BLEU_ORDER + 1)
    return {f"bleu{k}": Score(statistics, _bleu_from_counts(k)) for k in orders}


def _cider(gts: Texts, res: Texts) -> Score:
    """CIDEr-D; document frequencies come from these references, so one sample alone scores 0."""
    return Score.mean(_pycocoevalcap("cider.cider").Cider().compute_score(gts, res)[1])


def _rouge(gts: Texts, res: Texts) -> Score:
    return Score.mean(_pycocoevalcap("rouge.rouge").Rouge().compute_score(gts, res)[1])


def caption_scores(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    tokenized: bool = False,
) -> dict[str, Score]:
    """All caption metrics of one set of captions against several references each.

    Keys: bleu1..bleu4, rouge_l, cider.
    `tokenized` texts are words and spaces already and stay as they are.
    """
    check_aligned(predictions, references)
    empty = [i for i, texts in enumerate(references) if not texts]
    if empty:
        raise ValueError(f"every caption needs a reference, got none for samples {empty[:5]}")
    gts, res = _by_sample(predictions, references, tokenized)
    return _bleu(gts, res) | {"rouge_l": _rouge(gts, res), "cider": _cider(gts, res)}
