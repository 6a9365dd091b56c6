import json

import pytest

from duotone.tasks import read_passages
from duotone.tasks.text.passages import windows

START = 1


def letters(text):
    return [START, *map(ord, text)]


def written(folder, name, content):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_token_ids_need_no_tokenizer(tmp_path):
    path = written(tmp_path, "ids.json", [[1, 2, 3], [4, 5, 6, 7, 8]])
    passages = read_passages(path, 4)
    assert passages.documents == (((1, 2, 3),), ((4, 5, 6, 7),))
    other = read_passages(written(tmp_path, "other.json", [[1, 2, 4]]), 4)
    assert passages.fingerprint == read_passages(path, 4).fingerprint != other.fingerprint


def test_lines_of_text_are_documents_and_every_window_starts_alike(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "abcde", "more": 1}\n\n{"text": "f"}\n')
    (long, short) = read_passages(path, 4, letters).documents
    assert long == ((START, 97, 98, 99), (START, 100, 101))
    assert short == ((START, 102),)


def test_windows_of_a_plain_text_are_documents(tmp_path):
    path = written(tmp_path, "book.txt", "abcdefg")
    assert len(read_passages(path, 4, letters).documents) == 3
    without_start = read_passages(path, 4, lambda text: list(map(ord, text)))
    assert without_start.documents[1] == ((101, 102, 103),)


def test_a_last_token_alone_predicts_nothing():
    assert windows([1, 2, 3, 4, 5], 4) == ((1, 2, 3, 4),)
    assert windows([1, 2, 3, 4, 5], 4, start=[1]) == ((1, 2, 3, 4), (1, 5))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", [[1, 2], [3]], r"at least 2 token ids >= 0, got \[3\] in a\.json row 2"),
        ("a.json", [[True, 2]], "token ids >= 0, got"),
        ("a.json", ["text"], r"text belongs into a \.jsonl file"),
        ("a.json", {"ids": []}, "must hold a list of rows"),
        ("a.json", "[[1, 2]", "must be JSON, got none in a.json"),
        ("a.jsonl", '{"text": "ab"}\n{"words": 1}', r"\"text\": text.* in a\.jsonl line 2"),
        ("a.jsonl", '{"text": "  "}', r"got text = '  ' in a\.jsonl line 1"),
        (
            "a.jsonl",
            '{"text": 5}',
            r"got text = '5' in a\.jsonl line 1; is this the file of a task",
        ),
        ("a.jsonl", "{", r"must be JSON, got none in a\.jsonl line 1"),
        ("a.jsonl", "\n", "at least one row"),
        ("a.txt", "", "at least 2 tokens, got fewer in document 1 of a.txt"),
    ],
)
def test_bad_data_say_where(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        read_passages(written(tmp_path, name, content), 8, letters)


def test_misuse_raises(tmp_path):
    with pytest.raises(ValueError, match="existing file, got"):
        read_passages(tmp_path / "gone.json", 8)
    with pytest.raises(ValueError, match=r"text needs a tokenizer, got none for a\.txt"):
        read_passages(written(tmp_path, "a.txt", "words"), 8)
    with pytest.raises(ValueError, match="context must be at least 2"):
        read_passages(tmp_path / "a.json", 1)
