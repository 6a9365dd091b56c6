"""A whole calibration: pictures, text next to these, both comparisons with presets.

The command and `calibrated` go through here. This file prints nothing and writes no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from duotone.loading import Loaded
from duotone.quant import CacheSpec
from duotone.quant.bases import Bases
from duotone.quant.our_schemes import with_pictures
from duotone.tasks import WRITTEN

from .compared import Progress, compare
from .data import CalibrationData
from .files import BASES, TEXT
from .run import calibrate
from .settings import Settings
from .text import (
    check_has_pictures,
    check_text,
    joined,
    no_pictures,
    text_settings,
    written_data,
)
from .written import Written

HELD_OUT = 8
# Settings of text that is calibrated, the spec of a scheme's text, or None for 16 bit.
Words = Settings | CacheSpec | None
# A context in which a stage of that name runs; its value receives (done, total).
Stage = Callable[[str], AbstractContextManager[Progress]]


@contextmanager
def silent(stage: str) -> Iterator[Progress]:
    """Show nothing of a stage."""
    yield lambda done, total: None


@dataclass(frozen=True)
class End:
    """End of a calibration. found: its spec; spec: the one to use; text: bases of text, if any."""

    bases: Bases
    found: CacheSpec
    spec: CacheSpec
    report: dict[str, Any]
    text: Bases | None = None


def heldout_of(asked: int | None, tasks: int) -> int:
    """Held-out samples of each of so many tasks. asked: their number, None for as many as usual."""
    return max(3, HELD_OUT // tasks) if asked is None else asked


def words_of(
    name: str | None,
    settings: Settings,
    tasks: list[Any],
    model: str | None,
    spec_of: Callable[[str], CacheSpec],
) -> Words:
    """Text next to pictures by its name. spec_of: the spec of a scheme's name.

    Errors: ValueError for schemes that cannot stand there, and where no task has pictures.
    """
    if name is None:
        return None
    words: Words = text_settings(name, settings)
    if words is None:
        words = spec_of(name)
        check_text(words)
    if all(task.name == WRITTEN for task in tasks):
        raise no_pictures(model)
    return words


def data_of_words(
    words: Words,
    loaded: Loaded,
    data: CalibrationData,
    task: Written,
    sizes: Mapping[str, Any],
    waiting: Callable[[str], AbstractContextManager[Any]] = silent,
) -> CalibrationData | None:
    """Data of text that is to be calibrated; None for other text, which the model can have.

    data: of the pictures. sizes: as `written_data` has them. waiting: a context for the writing.
    Errors: ValueError for a model without pictures, and for text that does not fit.
    """
    if words is None:
        return None
    is_calibrated = isinstance(words, Settings)
    check_has_pictures(loaded.model, data.batches, None if is_calibrated else words)
    if not is_calibrated:
        return None
    with waiting("writing text"):
        return written_data(loaded, task, words, **sizes)


def whole(
    loaded: Loaded,
    data: CalibrationData,
    settings: Settings,
    words: Words,
    written: CalibrationData | None,
    files: Mapping[str, Path],
    *,
    name: str | None = None,
    keep_found: bool = False,
    stage: Stage = silent,
) -> End:
    """Calibrate on `data`, then text on `written` where it has some, and put both together.

    files: paths of bases, by kind (`files_of`). name: of the words, for the report. keep_found:
    calibrated specs stay, whatever the comparisons say.
    """
    given = (files[BASES], keep_found, stage)
    end = _calibrated(loaded, data, settings, *given)
    if written is None:
        return _with_scheme(end, words, name)
    given = (files[TEXT], keep_found, stage)
    return _with_text(end, _calibrated(loaded, written, words, *given, of=" text"), name)


def _calibrated(
    loaded: Loaded,
    data: CalibrationData,
    settings: Settings,
    file: Path,
    keep_found: bool,
    stage: Stage,
    of: str = "",
) -> End:
    """Calibrate on some data, and compare on its held-out part. of: for the stages' names."""
    started = perf_counter()
    with stage(f"calibrating{of}") as progress:
        bases, found, report = calibrate(
            loaded, data.batches, settings, file=str(file), data=data.sources, progress=progress
        )
    seconds, spec, end = {"calibration": perf_counter() - started}, found, None
    if data.heldout:
        with stage(f"comparing{of} with presets") as progress:
            end, spec = compare(
                loaded, bases, found, data.heldout, keep_found=keep_found, progress=progress
            )
        seconds["comparison"] = perf_counter() - started - seconds["calibration"]
    report |= {"verdict": end and end.to_dict(), "seconds": seconds}
    return End(bases, found, spec, report)


def _with_scheme(end: End, words: CacheSpec | None, name: str | None) -> End:
    """Pictures next to the text of a scheme, or to text in 16 bit."""
    found, spec = end.found, end.spec
    if words is not None:
        spec, found = with_pictures(words, spec), with_pictures(words, found)
    return replace(end, found=found, spec=spec, report=end.report | {"text": name})


def _with_text(end: End, text: End, name: str | None) -> End:
    """Pictures next to calibrated text."""
    depth = len(end.bases.key)
    spec = joined(text.spec, end.spec, depth)
    found = joined(text.found, end.found, depth)
    report = end.report | {"text": {"scheme": name} | text.report}
    return End(end.bases, found, spec, report, text.bases)
