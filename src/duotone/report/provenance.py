"""Provenance in every result file: commit, date, versions, device."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "triton", "duotone")


def commit() -> str | None:
    """The commit of the source tree this package runs from, '+dirty' with local changes.

    $DUOTONE_COMMIT wins: a copy of the tree on a lent machine has no history, or an older one.
    """
    if "DUOTONE_COMMIT" in os.environ:
        return os.environ["DUOTONE_COMMIT"]
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        if head.returncode != 0:
            return None
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + ("+dirty" if changes.stdout.strip() else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Installed versions of Python and of the packages that decide a result."""
    import duotone

    found = {package: _version(package) for package in _PACKAGES}
    found["duotone"] = found["duotone"] or duotone.__version__
    found["python"] = platform.python_version()
    return {package: version for package, version in found.items() if version}


def device_name(device: Any) -> str:
    """'NVIDIA H200' for a CUDA device, the processor for the CPU."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()} ({platform.processor() or platform.system()})"


def stamp(device: Any) -> dict[str, Any]:
    """The header of a result file."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "device": device_name(device),
    }


def write_new_json(path: str | Path, data: Mapping[str, Any]) -> Path:
    """Write `data` to a file that must not exist yet."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
    except FileExistsError as error:
        raise ValueError(
            f"a result file is never overwritten, got the existing {str(path)!r}; "
            "move it away or give another --out"
        ) from error
    return path
