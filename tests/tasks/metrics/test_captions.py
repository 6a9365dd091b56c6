import json
import sys
from pathlib import Path

import numpy as np
import pytest

from duotone.tasks.metrics import captions, confidence_interval, tokenizer
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
needs_java = pytest.mark.skipif(tokenizer.java_path() is None, reason="needs Java")


@pytest.fixture(scope="module")
def coco_scores():
    if not COCO.exists():
        pytest.skip(f"{COCO} is not on this machine")
    data = json.loads(COCO.read_text())
    predictions = [data["res"][key][0] for key in data["gts"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captions, "java_path", lambda: None)
        return caption_scores(predictions, list(data["gts"].values()), tokenized=True)


@pytest.mark.parametrize("name", KNOWN)
def test_coco_sample_results_have_their_known_scores(coco_scores, name):
    assert coco_scores[name].value == pytest.approx(KNOWN[name], abs=5e-5)


@needs_java
@pytest.mark.slow
@pytest.mark.skipif(not COCO.exists(), reason=f"{COCO} is not on this machine")
def test_meteor_of_the_coco_sample_results():
    data = json.loads(COCO.read_text())
    predictions = [data["res"][key][0] for key in data["gts"]]
    scores = caption_scores(predictions, list(data["gts"].values()), tokenized=True)
    interval = confidence_interval(scores["meteor"], resamples=200)
    assert interval.value == pytest.approx(0.1953, abs=5e-5)
    assert interval.low < interval.value < interval.high


def test_known_scores_notice_a_wrong_caption(coco_scores):
    data = json.loads(COCO.read_text())
    shifted = np.roll([data["res"][key][0] for key in data["gts"]], 1).tolist()
    wrong = captions._by_sample(shifted, list(data["gts"].values()), tokenized=True)
    assert captions._cider(*wrong).value < 0.2 * KNOWN["cider"]


@needs_java
def test_python_tokens_equal_ptb_on_prose():
    texts = [
        "A red circle, left of the blue-ish square.",
        "There isn't a dog's bone; 12 stars!",
        "",
        "Two people eat 3.5 pies: $12.50 each",
    ]
    ptb = tokenizer.tokenize_ptb(texts, captions._ptb_jar())
    assert tokenizer.tokenize_python(texts) == ptb


def test_python_tokens_differ_from_ptb_where_documented():
    assert tokenizer.tokenize_python(["Mr. Smith"]) == ["mr smith"]


def test_without_java_there_is_no_meteor_and_the_rest_stays(monkeypatch):
    monkeypatch.setattr(captions, "java_path", lambda: None)
    assert captions.tokenizer_name() == "python"
    scores = caption_scores(PREDICTIONS, REFERENCES)
    assert "meteor" not in scores
    assert scores["rouge_l"].value > 0.5


def test_bleu_equals_the_library_also_with_empty_and_short_captions(monkeypatch):
    monkeypatch.setattr(captions, "java_path", lambda: None)
    from pycocoevalcap.bleu.bleu import Bleu

    predictions = [*PREDICTIONS, "", "star"]
    references = [*REFERENCES, ["a star"], ["a star", "the star"]]
    scores = caption_scores(predictions, references)
    theirs, _ = Bleu().compute_score(
        *captions._by_sample(predictions, references, False), verbose=0
    )
    assert [scores[f"bleu{k}"].value for k in range(1, 5)] == pytest.approx(theirs, rel=1e-9)


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocoevalcap.tokenizer.ptbtokenizer", None)
    with pytest.raises(ImportError, match=r"duotone\[eval\]"):
        caption_scores(PREDICTIONS, REFERENCES)


def test_a_caption_without_reference_raises():
    with pytest.raises(ValueError, match="every caption needs a reference"):
        caption_scores(["a star"], [[]])
