"""Tables of `quality.py` and `memory.py`."""

from collections.abc import Iterable, Mapping, Sequence

from duotone.report.markdown import Result, markdown_table, source, with_interval

REFERENCE, PLAIN = "bf16", "none"
# Best first, baselines after them; others follow by name.
ORDER = (REFERENCE, "quarot-vision8-per-token", "mquant-vision8-down-per-token")
ORDER += ("mquant-vision8-heads-outputs-per-token", "mquant-down-per-token")
ORDER += ("mquant-outputs-per-token", "mquant-heads-outputs-per-token", "mquant")
ORDER += (
    "mquant-vision8",
    "mquant-head8",
    "mquant-always-split",
    "quarot-per-token",
    "static-msq-rotation",
    "quarot",
)
ORDER += ("static-msq", "static-msq-aifs", "static", "dynamic", "awq-dynamic", "awq")
ORDER += ("smoothquant-gptq-dynamic", "smoothquant-gptq", "smoothquant", "rtn-dynamic", "rtn")


def quality_table(results: Sequence[Result]) -> str:
    """A row per recipe: headline scores, their paired difference to bf16, KL, megabytes.

    Results with outlier channels have a table of their own, by stress; those without answers none.
    """
    answered = [r for r in results if all(t["headline"] in t["metrics"] for t in _tasks(r))]
    parts = []
    for stress in _stresses(answered):
        rows = [r for r in answered if stress_of(r) == stress or r["recipe"] == REFERENCE]
        title = f"**With outlier channels: {stress}**\n\n" if stress != PLAIN else ""
        parts.append(title + _quality_table(rows))
    return "\n\n".join(parts)


# Rows and columns of docs/mquant.md.
SUMMARY = ("quarot-vision8-per-token-w4a8", "mquant-vision8-down-per-token-w4a8")
SUMMARY += ("mquant-vision8-heads-outputs-per-token-w4a8", "mquant-down-per-token-w4a8")
SUMMARY += ("mquant-w4a8",)
SUMMARY += (
    "quarot-per-token-w4a8",
    "smoothquant-gptq-dynamic-w4a8",
    "awq-dynamic-w4a8",
    "static-msq-w4a8",
    "static-w4a8",
)
SUMMARY += ("dynamic-w4a8", "rtn-w4a8", "mquant-w8a8", "rtn-w8a8", "w4a16-g128")
SUMMARY_TASKS = ("captions", "documents")
SUMMARY_STRESSES = (PLAIN, "hidden x64", "visual x64", "values x16")


def quality_summary(results: Sequence[Result]) -> str:
    """Divergence from bf16 of the recipes of SUMMARY by task, with outlier channels as well."""
    whole = [r for r in results if set(SUMMARY_TASKS) <= set(r["tasks"])]
    stresses = [s for s in SUMMARY_STRESSES if s in _stresses(whole)]
    kept = {(r["recipe"], stress_of(r)): r for r in whole}
    header = ["recipe", "MB"]
    for stress in stresses:
        more = f", {stress}" if stress != PLAIN else ""
        header += [f"{task}{more}, KL (nats)" for task in SUMMARY_TASKS]
    rows = []
    for recipe in (name for name in SUMMARY if (name, PLAIN) in kept):
        found = [kept.get((recipe, stress)) for stress in stresses]
        rows.append([recipe, megabytes(found[0], 0), *_divergences(found, SUMMARY_TASKS)])
    note = f"± half the 95 % bootstrap interval; {source(*whole)}"
    return f"{markdown_table(header, rows)}\n\n*{note}.*"


def _divergences(found: Sequence[Result | None], tasks: Iterable[str]) -> list[str]:
    return [
        "" if one is None else with_interval(one["tasks"][task]["metrics"]["kl"], 5)
        for one in found
        for task in tasks
    ]


def stress_of(result: Result) -> str:
    """Outlier channels that a result's model had; older results name their factor alone."""
    factor = result.get("outliers", 1.0)
    return result.get("stress", PLAIN if factor == 1 else f"visual x{factor:g}")


def _stresses(results: Iterable[Result]) -> list[str]:
    """All stresses, none first."""
    return sorted({stress_of(result) for result in results}, key=lambda s: (s != PLAIN, s))


def _tasks(result: Result) -> list[Mapping]:
    return list(result["tasks"].values())


def _quality_table(results: Sequence[Result]) -> str:
    ordered = sorted(results, key=lambda result: place(result["recipe"]))
    tasks = list(ordered[0]["tasks"])
    header = ["recipe", "MB"]
    for name in tasks:
        header += [f"{name}, {ordered[0]['tasks'][name]['headline']}", "minus bf16", "KL (nats)"]
    before = max(r["bytes"]["before"]["total"] for r in results if "bytes" in r)
    rows = [[r["recipe"], megabytes(r, before), *_cells(r, tasks)] for r in ordered]
    samples = ordered[0]["tasks"][tasks[0]]["samples"]
    calibration = max(s["samples"] for r in results for s in r.get("calibration", [{"samples": 0}]))
    note = (
        f"{samples} held-out and {calibration} calibration samples per task; KL per token of bf16's"
        f" answers; ± half the 95 % bootstrap interval; differences with theirs; {source(*results)}"
    )
    return f"{markdown_table(header, rows)}\n\n*{note}.*"


def place(recipe: str) -> tuple[int, int, str]:
    """Sort key of a recipe's row."""
    name, _, bits = recipe.rpartition("-")
    if recipe == REFERENCE:
        return -1, 0, ""
    return (
        ("w4a8", "w8a8").index(bits) if bits in ("w4a8", "w8a8") else 2,
        (ORDER.index(name) if name in ORDER else len(ORDER)),
        recipe,
    )


def megabytes(result: Result, before: int) -> str:
    """Size of a result's model; `before` where it is not quantized."""
    after = result["bytes"]["after"]["total"] if "bytes" in result else before
    return f"{after / 1e6:.1f}"


def _cells(result: Result, tasks: Iterable[str]) -> list[str]:
    cells = []
    for name in tasks:
        task = result["tasks"][name]
        headline, metrics = task["headline"], task["metrics"]
        difference = task["differences"].get(headline)
        cells += [
            with_interval(metrics[headline]),
            "" if difference is None else _signed(difference),
            "" if difference is None else with_interval(metrics["kl"], 5),
        ]
    return cells


def _signed(found: Mapping[str, float]) -> str:
    return f"{found['value']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def memory_table(results: Sequence[Result]) -> str:
    """Gigabytes of each part of a 7B shape."""
    rows = [row for result in results for row in result["rows"]]
    parts = [name for name in rows[0] if name != "recipe"]
    lines = [[row["recipe"], *(f"{row[name] / 1e9:.2f}" for name in parts)] for row in rows]
    return f"{markdown_table(['GB', *parts], lines)}\n\n*{source(*results)}.*"


# {name of the table: (schema of its result files, function that renders them)}
RENDERERS = {
    "mquant-quality-summary": ("duotone.mquant.quality/1", quality_summary),
    "mquant-quality": ("duotone.mquant.quality/1", quality_table),
    "mquant-memory": ("duotone.mquant.memory/1", memory_table),
}
