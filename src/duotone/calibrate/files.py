"""The two files of a calibration, and the partial folder of an unfinished one."""

from __future__ import annotations

from pathlib import Path

from duotone.quant import CacheSpec
from duotone.quant.bases import Bases
from duotone.resume import SUFFIX, not_partial

from .sums import ONLY, unfinished


def write(bases: Bases, spec: CacheSpec, out: str | Path) -> tuple[Path, Path]:
    """Write the bases and, next to them, the spec; remove a partial folder.

    Errors: ValueError for files that exist.
    """
    files = check_files(out)
    bases.save(files[0])
    files[1].write_text(spec.to_json() + "\n", encoding="utf-8")
    unfinished(partial_of(out), {}).remove()
    return files


def files_of(out: str | Path) -> tuple[Path, Path]:
    """OUT.safetensors and OUT.json; OUT may name either."""
    text = str(out)
    for suffix in (".safetensors", ".json"):
        text = text.removesuffix(suffix)
    return Path(text + ".safetensors"), Path(text + ".json")


def partial_of(out: str | Path) -> Path:
    """OUT.partial, the folder where an interrupted calibration keeps its sums."""
    return files_of(out)[0].with_suffix(SUFFIX)


def check_files(out: str | Path) -> tuple[Path, Path]:
    """Check that neither file exists and that both can be written; returns both paths.

    Errors: ValueError if not, or if there is a partial folder that cannot be read.
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
    _check_partial(partial_of(out))
    return files


def _check_partial(folder: Path) -> None:
    former = folder.with_name(f"{folder.name}.safetensors")
    if former.exists():
        reason = "an earlier version kept its sums in one file, which cannot be gone on with"
        raise not_partial("calibration", former, reason)
    kept = unfinished(folder, {})
    if folder.exists():
        kept.found_identity()
    if kept.has(ONLY):
        kept.read(ONLY)
