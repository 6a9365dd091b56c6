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


def with_16_bit_numbers(scheme: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a row's memory as a 16-bit model would have it: 16 bits for a number left dense.

    scheme: its "memory", and its "spec" or None, which is dense as a whole. dtype: what the model
    computed in. Only "float32" is counted anew.
    """
    memory, spec = dict(scheme["memory"]), scheme["spec"]
    if dtype != "float32":
        return memory
    dense_bytes = memory["dense_bytes"] if spec else memory["total_bytes"]
    total_bytes = memory["total_bytes"] - dense_bytes // 2
    memory["bits_per_element"] *= total_bytes / memory["total_bytes"]
    memory["total_bytes"] = total_bytes
    return memory if spec else memory | {"nominal_bits": 16.0}
