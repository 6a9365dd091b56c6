import json

import pytest
from PIL import Image

from duotone.tasks import TASKS, folder_task, get_task

ROW = {"images": ["pictures/a.png"], "question": "What colour?", "answers": ["red", "a red"]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    Image.new("RGBA", (6, 5), "red").save(tmp_path / "pictures/a.png")
    return tmp_path


def written(folder, *lines):
    path = folder / "mine.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_reproducible_and_splits_differ(name):
    task = get_task(name)
    first, again = task.example(3), task.example(3)
    assert (first.question, first.answers) == (again.question, again.answers)
    assert [image.tobytes() for image in first.images] == [i.tobytes() for i in again.images]
    others = [task.example(3, split) for split in ("calibration", "train")]
    assert len({first.name, *(other.name for other in others)}) == 3
    assert all(other.images[0].tobytes() != first.images[0].tobytes() for other in others)


@pytest.mark.parametrize("name", TASKS)
def test_references_score_full_marks_on_the_headline(name):
    task = get_task(name)
    examples = [task.example(i) for i in range(6)]
    right = task.score(examples, [example.answers[0] for example in examples])
    wrong = task.score(examples, ["zebra"] * 6)
    assert wrong[task.headline].value < 0.1
    assert right[task.headline].value >= (1.0 if name != "captions" else 2.0)


def test_folder_task_reads_pictures_relative_to_the_file(folder):
    task = get_task(str(written(folder, ROW, "", ROW)))
    assert (task.name, task.size, task.headline) == ("mine", 2, "anls")
    example = task.example(1, "calibration")
    assert (example.images[0].size, example.images[0].mode) == ((6, 5), "RGB")
    assert (example.question, example.answers) == ("What colour?", ("red", "a red"))


def test_other_data_under_the_same_name_is_another_task(folder):
    first, same = (folder_task(written(folder, ROW)) for _ in range(2))
    other = folder_task(written(folder, ROW | {"question": "Which colour?"}))
    assert first.fingerprint == same.fingerprint != other.fingerprint


def test_folder_task_takes_other_metrics(folder):
    assert folder_task(written(folder, ROW), metrics=("captions",)).headline == "cider"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "no valid JSON in mine.jsonl line 1"),
        ([ROW, {"images": []}], "mine.jsonl line 2"),
        ([ROW | {"answers": []}], "at least one answer"),
        ([ROW | {"answers": "red"}], "each line must be"),
        (["[1]"], "each line must be"),
        ([""], "at least one row"),
        (
            [{"image": "pictures/a.png", "question": "?", "answers": ["red"]}],
            r"got 'image' in mine\.jsonl line 1; did you mean 'images'",
        ),
        ([ROW, ROW | {"images": ["gone.png"]}], r"gone\.png' in mine\.jsonl line 2"),
    ],
    ids=[
        *("broken", "missing", "no answers", "text for list", "no object", "empty"),
        *("misspelt", "no picture"),
    ],
)
def test_bad_rows_say_which_line(folder, lines, message):
    with pytest.raises(ValueError, match=message):
        folder_task(written(folder, *lines))


def test_missing_files_are_named(folder):
    with pytest.raises(ValueError, match=r"nowhere\.jsonl"):
        get_task(str(folder / "nowhere.jsonl"))


def test_other_fields_and_ends_of_lines_inside_texts_are_fine(folder):
    row = ROW | {"id": 7, "question": "one\u2028two"}
    task = folder_task(written(folder, json.dumps(row, ensure_ascii=False)))
    assert task.example(0).question == "one\u2028two"


def test_other_encodings_are_refused_by_the_files_name(folder):
    (folder / "latin.jsonl").write_bytes(b'{"question": "\xfc"}')
    with pytest.raises(ValueError, match=r"must be UTF-8, got .*latin\.jsonl"):
        folder_task(folder / "latin.jsonl")


def test_a_file_that_is_no_picture_is_named(folder):
    (folder / "pictures/a.png").write_text("not a picture")
    task = get_task(str(written(folder, ROW)))
    with pytest.raises(ValueError, match="must be an image file that Pillow reads"):
        task.example(0)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("gsm8k", "gsm8k_cot"),
        ("truthfulqa", "truthfulqa_gen"),
        ("longbench", "longbench"),
        ("longbench-repobench-p", "longbench_repobench-p"),
    ],
)
def test_text_benchmarks_are_refused_with_the_lines_that_run_them_by_lm_eval(name, theirs):
    with pytest.raises(ValueError, match=f"run by lm-eval, got '{name}'; pip install") as refused:
        get_task(name)
    evaluation = f"HFLM(pretrained=model, tokenizer=tokenizer), tasks=['{theirs}'])"
    line = f"with duotone.enable(model, spec): lm_eval.simple_evaluate({evaluation}"
    assert line in str(refused.value)


def test_unknown_tasks_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean documents"):
        get_task("document")
