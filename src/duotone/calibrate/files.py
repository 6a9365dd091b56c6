"""The two files of a calibration, and the partial file of an unfinished one."""

from __future__ import annotations

from pathlib import Path

from duotone.quant import CacheSpec
from duotone.quant.bases import Bases

from .partial import read_header, remove_partial


def write(bases: Bases, spec: CacheSpec, out: str | Path) -> tuple[Path, Path]:
    """Write the bases and, next to them, the spec; remove a partial file.

    Errors: ValueError for files that exist.
    """
    files = check_files(out)
    bases.save(files[0])
    files[1].write_text(spec.to_json() + "\n", encoding="utf-8")
    remove_partial(partial_of(out))
    return files


def files_of(out: str | Path) -> tuple[Path, Path]:
    """OUT.safetensors and OUT.json; OUT may name either."""
    text = str(out)
    for suffix in (".safetensors", ".json"):
        text = text.removesuffix(suffix)
    return Path(text + ".safetensors"), Path(text + ".json")


def partial_of(out: str | Path) -> Path:
    """OUT.partial.safetensors, where an interrupted calibration keeps its sums."""
    return files_of(out)[0].with_suffix(".partial.safetensors")


def check_files(out: str | Path) -> tuple[Path, Path]:
    """Check that neither file exists and that both can be written; returns both paths.

    Errors: ValueError if not, or if there is a partial file that cannot be read.
    """
    files = files_of(out)
    found = [str(path) for path in files if path.exists()]
    if found:
        raise ValueError(
            f"files are never overwritten, got the existing {', '.join(found)}; move them away or "
            "give another --out"
        )
    try:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        files[0].touch()
        files[0].unlink()
    except OSError as error:
        raise ValueError(
            f"--out must be a path that can be written, got {str(out)!r}: {error}"
        ) from error
    if partial_of(out).exists():
        read_header(partial_of(out))
    return files
