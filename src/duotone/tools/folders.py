"""Folders that outlive a process."""

from __future__ import annotations

import os
from pathlib import Path


def user_folder() -> Path:
    """Folder of what duotone keeps for a user: $DUOTONE_CACHE, else ~/.cache/duotone (XDG)."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DUOTONE_CACHE") or Path(home) / "duotone")
