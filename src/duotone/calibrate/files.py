"""The two files of a calibration."""

from __future__ import annotations

from pathlib import Path

from duotone.quant import CacheSpec
from duotone.quant.bases import Bases


def write(bases: Bases, spec: CacheSpec, out: str | Path) -> tuple[Path, Path]:
    """Write the bases and, next to them, the spec. Errors: ValueError for files that exist."""
    files = check_files(out)
    bases.save(files[0])
    files[1].write_text(spec.to_json() + "\n", encoding="utf-8")
    return files


def files_of(out: str | Path) -> tuple[Path, Path]:
    """OUT.safetensors and OUT.json; OUT may name either."""
    text = str(out)
    for suffix in (".safetensors", ".json"):
        text = text.removesuffix(suffix)
    return Path(text + ".safetensors"), Path(text + ".json")


def check_files(out: str | Path) -> tuple[Path, Path]:
    """Check that neither file exists and that both can be written; returns both paths.

    Errors: ValueError if not.
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
    return files
