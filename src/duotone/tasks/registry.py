"""The embedded tasks, and the loader of users' own data."""

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duotone.tools import json_text

from .pictures import open_picture
from .task import Example, Task
from .text.rows import fingerprint, lines_of, read_text

_SEEDS = {"heldout": "HELD_OUT_SEEDS", "calibration": "CALIBRATION_SEEDS", "train": "TRAIN_SEEDS"}


@dataclass(frozen=True)
class SyntheticSource:
    """Examples of one generator of `duotone.tasks.synthetic`; seed ranges keep splits disjoint.

    kind: which turns of a sample to ask; sample i asks its turn i mod (number of such turns).
    """

    generator: str
    kind: str | None = None

    def __call__(self, split: str, index: int) -> Example:
        """Render example `index` of `split`."""
        package = "duotone.tasks.synthetic"
        seeds = getattr(importlib.import_module(f"{package}.sample"), _SEEDS[split])
        sample = importlib.import_module(f"{package}.{self.generator}").generate(seeds[index])
        turns = sample.of_kind(self.kind) if self.kind else sample.turns
        turn = turns[index % len(turns)]
        name = f"{self.generator}-{seeds[index]}"
        return Example(
            name, tuple(sample.images), turn.question, tuple(turn.answers), sample.objects
        )


TASKS: dict[str, Task] = {
    "captions": Task(
        name="captions",
        source=SyntheticSource("scenes", kind="caption"),
        metrics=("captions", "objects"),
        headline="cider",
        max_new_tokens=72,
    ),
    "documents": Task(
        name="documents",
        source=SyntheticSource("documents", kind="field"),
        metrics=("anls", "accuracy"),
        headline="anls",
        max_new_tokens=32,
    ),
    "sequences": Task(
        name="sequences",
        source=SyntheticSource("sequences"),
        metrics=("accuracy",),
        headline="accuracy",
        max_new_tokens=16,
    ),
}

# No member of TASKS: nobody knows right answers. A calibration takes the model's own.
MADE_UP = Task(
    name="made-up",
    source=SyntheticSource("made_up"),
    metrics=("accuracy",),
    headline="accuracy",
    max_new_tokens=32,
)

# Text that a model writes itself: `duotone.calibrate.written` has it.
WRITTEN = "written"
# Prompts without right answers, by name, and what they are.
UNANSWERED = {
    MADE_UP.name: "made-up samples have no answers",
    WRITTEN: "text that a model writes itself has no answers",
}

# Tasks of lm-eval by the names that earlier versions had for them, LongBench's by their start.
LM_EVAL_TASKS = {"gsm8k": "gsm8k_cot", "truthfulqa": "truthfulqa_gen"}
LONGBENCH = "longbench"


def lm_eval_name(name: str) -> str | None:
    """lm-eval's name of a text benchmark; None for other names."""
    if name.startswith(f"{LONGBENCH}-"):
        return name.replace("-", "_", 1)
    return LONGBENCH if name == LONGBENCH else LM_EVAL_TASKS.get(name)


def get_task(name: str) -> Task:
    """The task of that name, or the folder task of a JSONL file of that path."""
    if theirs := lm_eval_name(name):
        raise ValueError(
            f"text benchmarks are run by lm-eval, got {name!r}; pip install 'duotone[lm-eval]', "
            "then with duotone.enable(model, spec): lm_eval.simple_evaluate(HFLM(pretrained=model, "
            f"tokenizer=tokenizer), tasks=[{theirs!r}]) (docs/evaluating.md)"
        )
    if name in UNANSWERED:
        raise ValueError(
            f"samples must have answers here, got {name!r}: {UNANSWERED[name]}, duotone calibrate "
            f"alone takes these. Give one of {sorted(TASKS)} or a .jsonl file"
        )
    if name in TASKS:
        return TASKS[name]
    if name.endswith(".jsonl"):
        return folder_task(name)
    known = [*TASKS, "perplexity"]
    near = difflib.get_close_matches(name, [*known, *UNANSWERED], n=2, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(
        f"a task must be one of {sorted(known)} or the path of a .jsonl file, got {name!r}{hint}"
    )


# Fields of a row of a .jsonl file.
FIELDS = ("images", "question", "answers")


@dataclass(frozen=True)
class FolderSource:
    """Rows of a JSONL file; every split is the same rows."""

    folder: Path
    rows: tuple[dict[str, Any], ...]

    def __call__(self, split: str, index: int) -> Example:
        """Open the pictures of row `index`; `split` has no meaning here."""
        row = self.rows[index]
        images = tuple(open_picture(self.folder / image) for image in row.get("images", ()))
        return Example(f"row-{index + 1}", images, row["question"], tuple(row["answers"]))


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _parse_row(line: str, where: str, folder: Path) -> dict[str, Any]:
    """One line's row. Errors: ValueError, also for a missing picture."""
    rule = 'each line must be {"images": [paths], "question": text, "answers": [texts]}'
    try:
        row = json_text.loads(line)
    except ValueError as error:
        raise ValueError(f"{rule}, got no valid JSON in {where}: {error}") from error
    answers_ok = isinstance(row, dict) and _is_texts(row.get("answers")) and row["answers"]
    images_ok = answers_ok and _is_texts(row.get("images", []))
    if not (images_ok and isinstance(row.get("question"), str)):
        raise ValueError(f"{rule} with at least one answer, got {line.strip()[:200]} in {where}")
    for key in row.keys() - set(FIELDS):
        # A row may have other fields, but a misspelt field would be ignored silently.
        if near := difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.8):
            raise ValueError(f"{rule}, got {key!r} in {where}; did you mean {near[0]!r}?")
    for image in row.get("images", ()):
        if not (folder / image).is_file():
            raise ValueError(
                f"a picture must be an existing file, got {image!r} in {where} (looked in "
                f"{folder.resolve()}); paths are relative to the .jsonl file"
            )
    return row


def _headline(metrics: Sequence[str]) -> str:
    return {"captions": "cider", "objects": "object_recall"}.get(metrics[0], metrics[0])


def folder_task(
    path: str | Path, metrics: Sequence[str] = ("anls", "accuracy"), max_new_tokens: int = 64
) -> Task:
    """A task from a JSONL file of {"images": [...], "question": ..., "answers": [...]}.

    `images` may be left out; the paths in it are relative to the file. The first of `metrics` gives
    the headline.
    """
    path = Path(path)
    text = read_text(path)
    lines = lines_of(text, path.name).items()
    rows = tuple(_parse_row(line, where, path.parent) for where, line in lines)
    return Task(
        name=path.stem,
        source=FolderSource(path.parent, rows),
        metrics=tuple(metrics),
        headline=_headline(metrics),
        max_new_tokens=max_new_tokens,
        size=len(rows),
        fingerprint=fingerprint(text),
    )
