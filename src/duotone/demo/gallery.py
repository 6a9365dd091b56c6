"""All pictures that the page can ask about, by their ids, and the limits of those that are sent."""

from __future__ import annotations

import re
import threading
from hashlib import sha256
from pathlib import Path
from random import SystemRandom
from typing import Any

from PIL import Image, UnidentifiedImageError

from duotone.demo.entries import Entry, bundled, drawn, own
from duotone.inference.compare import Prompt
from duotone.tasks import open_picture
from duotone.tasks.synthetic.sample import HELD_OUT_SEEDS

MOST_BYTES = 10_000_000
MOST_PIXELS = 40_000_000
# Entries next to the bundled ones; the oldest goes.
MOST_ENTRIES = 16
LONGEST_QUESTION = 1000
_PIXELS = f"a picture must have at most {MOST_PIXELS // 1_000_000} million pixels"


class Gallery:
    """Entries by id.

    folder: for pictures that are drawn or sent; the caller removes it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._entries = bundled()

    def to_list(self) -> list[dict[str, Any]]:
        """JSON-safe data of all entries."""
        with self._lock:
            return [entry.to_dict(key) for key, entry in self._entries.items()]

    def file(self, key: str, number: int) -> Path:
        """Path of one of an entry's pictures. Errors: ValueError for an unknown one."""
        files = self._entry(key).files
        if not 0 <= number < len(files):
            raise ValueError(f"this entry has {len(files)} pictures, got number {number}")
        return files[number]

    def prompt(self, key: Any, question: Any) -> tuple[Prompt, tuple[str, ...]]:
        """(a question about an entry, the right answers or ()).

        Errors: ValueError for an unknown entry, or no question.
        """
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"a question must be a text, got {question!r}; write one")
        question = question.strip()
        if len(question) > LONGEST_QUESTION:
            raise ValueError(
                f"a question must have at most {LONGEST_QUESTION} letters, got {len(question)}"
            )
        entry = self._entry(key)
        prompt = Prompt(entry.name, entry.files, question)
        return prompt, entry.questions.get(question, ())

    def draw(self, kind: Any) -> dict[str, Any]:
        """Draw a new picture of a kind. Errors: ValueError for an unknown kind."""
        index = SystemRandom().randrange(len(HELD_OUT_SEEDS))
        return self._keep(f"{kind}-{index}", drawn(kind, index, self.folder))

    def add(self, name: str, data: bytes) -> dict[str, Any]:
        """Keep a picture that the user sent.

        Errors: ValueError for one that Pillow cannot read, or that is too large.
        """
        shown = re.sub(r"[^\w. -]", "_", Path(name.replace("\\", "/")).name)[-80:] or "picture"
        key = f"own-{sha256(data).hexdigest()[:16]}"
        path = self.folder / f"{key}.png"
        if not path.is_file():
            _save(data, path, shown)
        return self._keep(key, own(shown, path))

    def _entry(self, key: Any) -> Entry:
        with self._lock:
            if not isinstance(key, str) or key not in self._entries:
                raise ValueError(f"the picture must be one of the page's list, got {key!r}")
            return self._entries[key]

    def _keep(self, key: str, entry: Entry) -> dict[str, Any]:
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = entry
            others = [key for key, entry in self._entries.items() if not entry.is_kept]
            for oldest in others[:-MOST_ENTRIES]:
                for file in self._entries.pop(oldest).files:
                    file.unlink(missing_ok=True)
        return entry.to_dict(key)


def too_large(what: str, count: int, most: int) -> str:
    """The error of a picture or a request with so many bytes."""
    return f"{what} must have at most {most / 1e6:g} MB, got {count / 1e6:.1f} MB; make it smaller"


def _save(data: bytes, path: Path, name: str) -> None:
    """Write a picture in 8 bits, without the file's other contents."""
    if len(data) > MOST_BYTES:
        raise ValueError(too_large("a picture", len(data), MOST_BYTES))
    raw = path.with_suffix(".raw")
    raw.write_bytes(data)
    try:
        _check_pixels(raw)
        open_picture(raw).save(path)
    except ValueError as error:
        raise ValueError(str(error).replace(str(raw), name)) from error
    finally:
        raw.unlink()


def _check_pixels(path: Path) -> None:
    """Refuse many pixels in a small file before they are read."""
    try:
        with Image.open(path) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{_PIXELS}; {error}; make it smaller") from error
    except (UnidentifiedImageError, OSError):
        return  # `open_picture` says it
    if width * height > MOST_PIXELS:
        raise ValueError(f"{_PIXELS}, got {width} x {height}; make it smaller")
