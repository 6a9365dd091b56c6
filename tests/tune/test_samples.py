import json

import numpy as np
import pytest
from PIL import Image

from duotone.tasks import TASKS, get_task
from duotone.tune.samples import content_key, split_task


@pytest.fixture
def pictures(tmp_path):
    """Six rows over four pictures; rows 0 and 4 share one."""
    rng = np.random.default_rng(0)
    for name in "abcd":
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(
            tmp_path / f"{name}.png"
        )
    rows = [
        {"images": [f"{name}.png"], "question": f"q{i} ?", "answers": ["one"]}
        for i, name in enumerate("abcdac")
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return get_task(str(path))


def test_embedded_tasks_use_their_own_splits():
    parts = split_task(TASKS["documents"], 3, 5)
    names = {part: [t.example(i).name for i in range(t.size)]
             for part, t in (("search", parts.search), ("heldout", parts.heldout))}  # fmt: skip
    assert names["search"] == [TASKS["documents"].example(i, "calibration").name for i in range(3)]
    assert names["heldout"] == [TASKS["documents"].example(i, "heldout").name for i in range(5)]
    assert parts.evidence["search_split"] == "calibration"
    assert parts.evidence["search_digest"] != parts.evidence["heldout_digest"]


def test_rows_of_a_file_that_share_a_picture_are_not_held_out(pictures):
    parts = split_task(pictures, 2, 3)
    questions = [parts.heldout.example(i).question for i in range(3)]
    assert questions == ["q2 ?", "q3 ?", "q5 ?"]
    keys = [
        {content_key(t.example(i)) for i in range(t.size)} for t in (parts.search, parts.heldout)
    ]
    assert not keys[0] & keys[1]


def test_too_few_samples_are_refused(pictures):
    with pytest.raises(ValueError, match="at least 7 samples"):
        split_task(pictures, 3, 4)
    with pytest.raises(ValueError, match="whose pictures"):
        split_task(pictures, 2, 4)
    with pytest.raises(ValueError, match="at least one sample"):
        split_task(pictures, 0, 4)


def test_a_generator_without_disjoint_splits_is_refused():
    from dataclasses import replace

    from duotone.tasks import Example

    endless = replace(
        TASKS["documents"],
        source=lambda split, index: Example(f"row-{index}", (), "what ?", ("one",)),
    )
    with pytest.raises(ValueError, match="new to the search"):
        split_task(endless, 2, 2)
