"""Calibrations that are kept: a folder for each model, its settings and version of duotone."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duotone
from duotone.calibrate.files import SPEC, files_of
from duotone.hf.model.calibrated import check_bases
from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.fingerprint import fingerprint, lasting
from duotone.hf.model.identity import weights_digest
from duotone.hf.model.module_facts import number_facts
from duotone.quant import CacheSpec
from duotone.tools.digest import digest
from duotone.tools.folders import user_folder

NAME = "calibrated"  # of the files
KEY_DIGITS = 16


def folder_of(model: Any, given: Mapping[str, Any], root: str | Path | None) -> Path:
    """Absolute path of a model's calibration: in `root`, or in the user's folder.

    given: settings, and facts of the samples, JSON-safe. Reads all weights once.
    Errors: ValueError where the user has no folder.
    """
    data = {
        "duotone": duotone.__version__,
        "model": fingerprint(model),
        "weights": weights_digest(model),
        "numbers": number_facts(model),
        "generation": lasting(model.generation_config.to_dict()),
        **given,
    }
    key = digest({}, json.loads(json.dumps(data, default=str)))[:KEY_DIGITS]
    return _root(root) / f"{model.config.model_type}-{key}"


def _root(root: str | Path | None) -> Path:
    try:
        return (user_folder() / NAME if root is None else Path(root).expanduser()).absolute()
    except RuntimeError as error:  # nobody knows a home
        raise _unwritable(root, error) from error


def read(folder: Path, model: Any, facts: ModelFacts) -> CacheSpec | None:
    """Spec of a folder; None where there is no such folder.

    Errors: ValueError for a folder that is not whole, or damaged.
    """
    if not folder.exists():
        return None
    try:
        spec = CacheSpec.from_file(files_of(folder / NAME)[SPEC])
        check_bases(model, facts, spec)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"a kept calibration must be whole and of this model; got {str(folder)!r}: {error} "
            "Remove this folder, and call again."
        ) from error
    return spec


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A path for files of bases, specs and reports, which all become `folder` at the end.

    Another process may do so first: then its files stay. After an exception there are none.
    Errors: ValueError at the beginning, where nothing can be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    try:
        made = own / folder.name
        made.mkdir()
        yield made / NAME
        try:
            made.replace(folder)
        except OSError as error:
            if not folder.exists():  # else another process was first
                raise _unwritable(folder.parent, error) from error
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _unwritable(root: str | Path | None, error: Exception) -> ValueError:
    where = "the user's own" if root is None else repr(str(root))
    return ValueError(
        f"folder must be one that can be written, got {where}: {error}. Give another one: "
        "duotone.calibrated(model, processor, folder=...)"
    )
