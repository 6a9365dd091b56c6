import json
import sys
from pathlib import Path

import pytest

from duotone.tasks.metrics import captions, tokenizer
from duotone.tasks.metrics.captions import caption_scores

COCO = Path(__file__).resolve().parents[4] / "shared/data/coco_fakecap/fakecap_tokenized.json"
KNOWN = {
    "bleu1": 0.5794,
    "bleu2": 0.4044,
    "bleu3": 0.2785,
    "bleu4": 0.1908,
    "rouge_l": 0.3963,
    "cider": 0.5998,
}
PREDICTIONS = ["a red circle and a blue square", "two green stars", "a dog's house isn't far"]
REFERENCES = [
    ["a red circle next to a blue square", "a blue square and a red circle"],
    ["two green stars on a table", "a pair of green stars"],
    ["a dog's house isn't far", "the house of the dog"],
]


@pytest.fixture(scope="module")
def coco_scores():
    if not COCO.exists():
        pytest.skip(f"{COCO} is not on this machine")
    data = json.loads(COCO.read_text())
    predictions = [data["res"][key][0] for key in data["gts"]]
    return caption_scores(predictions, list(data["gts"].values()), tokenized=True)


@pytest.mark.parametrize("name", KNOWN)
def test_coco_sample_results_have_their_known_scores(coco_scores, name):
    assert coco_scores[name].value == pytest.approx(KNOWN[name], abs=5e-5)


def test_words_are_those_of_the_ptb_tokenizer_on_prose():
    texts = {
        "A red circle, left of the blue-ish square.": "a red circle left of the blue-ish square",
        "There isn't a dog's bone; 12 stars!": "there is n't a dog 's bone 12 stars",
        "": "",
        "Two people eat 3.5 pies: $12.50 each": "two people eat 3.5 pies $ 12.50 each",
        "Mr. Smith": "mr smith",  # "mr." there
    }
    assert tokenizer.tokenize(list(texts)) == list(texts.values())


def test_bleu_equals_the_library_also_with_empty_and_short_captions():
    from pycocoevalcap.bleu.bleu import Bleu

    predictions = [*PREDICTIONS, "", "star"]
    references = [*REFERENCES, ["a star"], ["a star", "the star"]]
    scores = caption_scores(predictions, references)
    theirs, _ = Bleu().compute_score(
        *captions._by_sample(predictions, references, False), verbose=0
    )
    assert [scores[f"bleu{k}"].value for k in range(1, 5)] == pytest.approx(theirs, rel=1e-9)


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocoevalcap.bleu.bleu_scorer", None)
    with pytest.raises(ImportError, match=r"duotone\[eval\]"):
        caption_scores(PREDICTIONS, REFERENCES)


def test_a_caption_without_reference_raises():
    with pytest.raises(ValueError, match="every caption needs a reference"):
        caption_scores(["a star"], [[]])
