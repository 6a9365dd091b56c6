"""Measured losses and speeds of the recommended schemes, as the package carries them.

`benchmarks/measured.py` in the repository writes the file from results; none of it is typed. An
entry is of the scheme as it is in this version: others are left out.
"""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

FILE = "measured.json"
KINDS = ("loss", "speed")


def measured(scheme: str) -> dict[str, list[dict[str, Any]]]:
    """{"loss": entries, "speed": entries} of NAME@BITS, empty where nothing was measured."""
    found = json.loads((files(__package__) / FILE).read_text(encoding="utf-8"))
    return {kind: found[kind].get(scheme, []) for kind in KINDS}


def loss_words(entries: list[dict[str, Any]], of_pictures: bool) -> Iterator[str]:
    """Yield a line per task that suits the model: of pictures, or of text alone."""
    for one in entries:
        if (one["task"] == "text") == of_pictures:
            continue
        kl = f", KL {one['kl']['value']:.3f} nats" if "kl" in one else ""
        yield (
            f"{one['task']}: {one['metric']} {one['value']:.3f} instead of "
            f"{one['reference']:.3f}{kl} ({one['model']}, {one['samples']} samples, "
            f"{_window(one['window'])}commit {one['commit']})"
        )


def speed_words(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line per load that was measured."""
    names = {"plain_ms": "plain", "static_ms": "compiled StaticCache"}
    for one in entries:
        others = (f"{name} {one[key]:.1f}" for key, name in names.items() if key in one)
        yield (
            f"{one['load']}: {one['ms_per_token']:.1f} ms per token; {', '.join(others)} "
            f"({one['device']}, random weights, commit {one['commit']})"
        )


def _window(tokens: int) -> str:
    return f"{tokens} recent tokens in 16 bit, " if tokens else ""
