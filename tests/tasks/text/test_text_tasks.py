import json
import sys
from types import SimpleNamespace

import pytest

from duotone.tasks import METRICS, TEXT_TASKS, get_task
from duotone.tasks.text.longbench import SUBSETS

GSM8K = {"question": "How many eggs?", "answer": "9 * 2 = 18\n#### 1,018"}
TRUTHFULQA = {
    "question": " What if I swallow a seed? ",
    "correct_answers": ["Nothing happens", "It passes."],
    "incorrect_answers": ["A tree grows", " "],
}
LONGBENCH = {
    "context": "def {question}():",
    "input": "Who {context}?",
    "answers": ["City", "Town"],
    "all_classes": ["City", "Country"],
}
ROWS = dict.fromkeys(TEXT_TASKS, LONGBENCH) | {"gsm8k": GSM8K, "truthfulqa": TRUTHFULQA}


def task_of(folder, name, *rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return get_task(name, path)


def test_gsm8k_shows_eight_worked_examples(tmp_path):
    task = task_of(tmp_path, "gsm8k", GSM8K)
    example = task.example(0)
    assert example.answers == ("1,018",)
    assert example.question.startswith("Q: There are 15 trees in the grove.")
    assert example.question.endswith("The answer is 8.\n\nQ: How many eggs?\nA:")
    assert example.question.count("\nA: ") == 8
    assert example.question.count("The answer is ") == 8
    scores = task.score([example], ["So 18. The answer is 1018."])
    assert scores[task.headline].value == 1.0
    assert task.until_stop("The answer is 5.\n\nQ: And 7?") == "The answer is 5.\n\n"


def test_truthfulqa_ends_with_the_question_and_knows_no_comment(tmp_path):
    task = task_of(tmp_path, "truthfulqa", TRUTHFULQA)
    example = task.example(0)
    assert example.question.count("Q: ") == 7
    assert example.question.endswith("Barcelona, Spain.\n\nQ: What if I swallow a seed?")
    assert example.answers == ("Nothing happens.", "It passes.", "I have no comment.")
    assert example.rivals == ("A tree grows.",)


@pytest.mark.parametrize("subset", SUBSETS)
def test_longbench_prompts_hold_context_and_question(tmp_path, subset):
    task = task_of(tmp_path, f"longbench-{subset}", LONGBENCH)
    question = task.example(0).question
    no_question = subset in ("gov_report", "multi_news", "passage_count", "lcc")
    assert question.count("def {question}():") == 1
    assert question.count("Who {context}?") == (0 if no_question else 1)
    assert question.count("{") == (1 if no_question else 2)
    renamed = {("question" if k == "input" else k): v for k, v in LONGBENCH.items()}
    assert task_of(tmp_path, f"longbench-{subset}", renamed).example(0).question == question


def test_trec_knows_its_classes(tmp_path):
    task = task_of(tmp_path, "longbench-trec", LONGBENCH)
    example = task.example(0)
    assert example.rivals == ("City", "Country")
    assert task.score([example], ["City"])["classes"].value == 1.0
    without = {k: v for k, v in LONGBENCH.items() if k != "all_classes"}
    with pytest.raises(
        ValueError, match=r"\"all_classes\": \[texts\], got .* in rows.jsonl line 1"
    ):
        task_of(tmp_path, "longbench-trec", without)


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_tasks_are_plain_and_scored_by_a_known_metric(tmp_path, name):
    task = task_of(tmp_path, name, ROWS[name], ROWS[name])
    assert (task.plain, task.size, task.name) == (True, 2, name)
    assert set(task.metrics) <= set(METRICS)
    assert task.example(1).name == "rows.jsonl line 2"
    assert task.example(0, "train").question == task.example(0).question


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "gsm8k",
            {"question": "?"},
            r"answer\": text.*, got \['question'\] in rows.jsonl line 1",
        ),
        ("gsm8k", TRUTHFULQA, "is this the file of another task"),
        ("gsm8k", GSM8K | {"answer": 5}, "got answer = '5'"),
        ("gsm8k", "{", "must be JSON, got none in rows.jsonl line 1"),
        ("gsm8k", "[1]", r"got \[1\] in rows.jsonl line 1"),
        ("gsm8k", "", "at least one row"),
        ("truthfulqa", TRUTHFULQA | {"correct_answers": []}, "got correct_answers = '"),
        ("longbench-qasper", LONGBENCH | {"answers": [3]}, "got answers = '"),
    ],
    ids=["missing", "other", "number", "broken", "list", "empty", "no-answers", "no-texts"],
)
def test_bad_rows_say_which_line(tmp_path, name, row, message):
    with pytest.raises(ValueError, match=message):
        task_of(tmp_path, name, row)


def test_rows_may_be_a_json_list(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GSM8K, GSM8K]))
    assert get_task("gsm8k", path).example(1).name == "rows.json row 2"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"a \.json file must hold a list of rows"):
        get_task("gsm8k", path)


def test_without_a_file_the_hub_is_read(monkeypatch):
    asked = []

    def load_dataset(*where, split):
        asked.append((*where, split))
        return [GSM8K]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = get_task("gsm8k")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert task.example(0).name == "openai/gsm8k main row 1"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"'duotone\[hub\]', or give a local file with --data"):
        get_task("gsm8k")


def test_data_belongs_to_text_tasks(tmp_path):
    with pytest.raises(ValueError, match="data belongs to a text task"):
        get_task("documents", tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="did you mean gsm8k"):
        get_task("gsm8")
