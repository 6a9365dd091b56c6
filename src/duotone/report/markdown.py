"""Markdown of numbers: tables, intervals, and where a result came from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A GitHub table; pipes inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def with_interval(interval: Mapping[str, float], digits: int = 3) -> str:
    """Value and half the width of its interval: '0.912 ± 0.014'."""
    half_width = (interval["high"] - interval["low"]) / 2
    return f"{interval['value']:.{digits}f} ± {half_width:.{digits}f}"


def source(*results: Result) -> str:
    """Devices and commits of all, the newest last; versions and date of the newest."""
    by_age = sorted(results, key=lambda result: result["created"])
    newest = by_age[-1]
    tools = ", ".join(f"{k} {v}" for k, v in newest["versions"].items() if k != "python")
    commits = ", ".join(dict.fromkeys((r["commit"] or "no commit")[:10] for r in by_age))
    devices = ", ".join(dict.fromkeys(result["device"] for result in by_age))
    return f"{devices}; {tools}; commit {commits}; {newest['created'][:10]}"
