"""The files of a calibration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duotone.quant import CacheSpec
from duotone.quant.bases import Bases, with_files

BASES, SPEC, REPORT, FOUND = ".safetensors", ".json", ".report.json", ".found.json"
TEXT = ".text.safetensors"  # bases of text beside those of pictures


def write(
    bases: Bases,
    spec: CacheSpec,
    out: str | Path,
    report: Mapping[str, Any] | None = None,
    found: CacheSpec | None = None,
    text: Bases | None = None,
) -> list[Path]:
    """Write the bases and, next to them, the spec to use and the report of the calibration.

    found: the calibrated spec, which is written as OUT.found.json where `spec` is another one.
    text: bases of text beside those of pictures, for OUT.text.safetensors.
    Specs name the bases by the file's name alone: the files may be moved together.
    Errors: ValueError for files that exist.
    """
    check_files(out)
    files = files_of(out)
    made = {BASES: bases} | ({} if text is None else {TEXT: text})
    own = [files[kind] for kind in made]
    texts = {SPEC: _text(spec, own)}
    if report is not None:
        texts[REPORT] = json.dumps(report, indent=1) + "\n"
    if found not in (None, spec):
        texts[FOUND] = _text(found, own)
    for kind, each in made.items():
        each.save(files[kind])
    for kind, content in texts.items():
        files[kind].write_text(content, encoding="utf-8")
    return [files[kind] for kind in (*made, *texts)]


def _text(spec: CacheSpec, own: Sequence[Path]) -> str:
    """JSON of a spec that lies beside its files of bases."""
    names = {path.resolve(): path.name for path in own}

    def name_of(file: str) -> str:
        return names.get(Path(file).resolve(), file)

    return json.dumps(with_files(spec.to_dict(), name_of)) + "\n"


def files_of(out: str | Path) -> dict[str, Path]:
    """{kind: path} of OUT.safetensors, OUT.json and others; OUT may name either of these."""
    text = str(out)
    for suffix in (BASES, SPEC):
        text = text.removesuffix(suffix)
    return {kind: Path(text + kind) for kind in (BASES, TEXT, SPEC, REPORT, FOUND)}


def check_files(out: str | Path) -> tuple[Path, Path]:
    """Check that no file exists and that all can be written; returns those of bases and spec.

    Errors: ValueError if not.
    """
    files = files_of(out)
    found = [str(path) for path in files.values() if path.exists()]
    if found:
        raise ValueError(
            f"files are never overwritten, got the existing {', '.join(found)}; move them away or "
            "give another --out"
        )
    try:
        files[BASES].parent.mkdir(parents=True, exist_ok=True)
        files[BASES].touch()
        files[BASES].unlink()
    except OSError as error:
        raise ValueError(
            f"--out must be a path that can be written, got {str(out)!r}: {error}"
        ) from error
    return files[BASES], files[SPEC]
