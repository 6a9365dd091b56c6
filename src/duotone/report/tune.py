"""Tables and page of `duotone tune` reports (schema duotone.tune/1)."""

from collections.abc import Sequence

from duotone.report.markdown import Result, markdown_table, source, with_interval


def _small(value: float) -> str:
    """Three digits of a divergence of any size."""
    return f"{value:.3g}"


def _origin(report: Result) -> str:
    """Samples and machine of a search."""
    parts = report["settings"]["tasks"]
    samples = ", ".join(
        f"{p['task']} {p['search_samples']} / {p['heldout_samples']}" for p in parts
    )
    trials = report["trials"]
    return (
        f"*Samples searched on / held out: {samples}; {trials['measured']} trials measured, "
        f"{trials['pruned']} given up early, {report['seconds']:.0f} s in all; {source(report)}.*"
    )


def tune_summary(results: Sequence[Result]) -> str:
    """`tune_table` with the chosen specs and the known schemes within the budget alone."""
    return tune_table([{**report, "heldout": _within_budget(report)} for report in results])


def _within_budget(report: Result) -> dict[str, Result]:
    return {
        label: found
        for label, found in report["heldout"].items()
        if found["bits"] <= report["budget"]["bits"] and not label.startswith("front ")
    }


def tune_table(results: Sequence[Result]) -> str:
    """Held-out divergence of the chosen specs, and of every known scheme, by rising bits."""
    tables = []
    for report in results:
        numbers, budget = report["heldout"], report["budget"]
        tasks = list(numbers["chosen"]["tasks"])
        labels = sorted(numbers, key=lambda label: (numbers[label]["bits"], label != "chosen"))
        rows = []
        for label in labels:
            cells = (with_interval(numbers[label]["tasks"][task]["kl"], 4) for task in tasks)
            name = f"**{label}**" if label == "chosen" else label
            row = [name, f"{numbers[label]['bits']:.2f}", _small(numbers[label]["kl"]), *cells]
            rows.append(row)
        of = "visual number" if budget["of"] == "visual" else "number"
        header = ["spec", f"true bits per {of}", "KL, geometric mean", *(f"{t}, KL" for t in tasks)]
        title = f"{report['settings']['model']['name']}, budget {budget['bits']:.2f} bits:"
        tables += [title, markdown_table(header, rows), _origin(report)]
    return "\n\n".join(tables)


def tune_comparisons(results: Sequence[Result]) -> str:
    """Every published scheme with the front's best point of no more bits, held out."""
    tables = []
    for report in results:
        rows = []
        for row in report["comparisons"]:
            ours = ["none of so few bits", "", ""]
            if "by" in row:
                ours = [f"{row['its_bits']:.2f}", _small(row["its_kl"]), _factor(row)]
            rows.append([row["label"], f"{row['bits']:.2f}", _small(row["kl"]), *ours])
        header = ["published", "true bits", "KL", "found: true bits", "KL", "KL ratio"]
        tables += [markdown_table(header, rows), _origin(report)]
    return "\n\n".join(tables)


def _factor(row: Result) -> str:
    """Factor by which the found divergence is smaller; bold where it is larger."""
    ratio = row["kl"] / row["its_kl"] if row["its_kl"] else float("inf")
    return f"{ratio:.1f}x" if row["beaten"] else f"**{ratio:.2f}x**"


def tune_sensitivity(results: Sequence[Result]) -> str:
    """KL with K or V of one layer at 2 bits and all else at 8."""
    tables = []
    for report in results:
        found = report["sensitivity"]
        pairs = zip(found["key"], found["value"], strict=True)
        rows = [[str(i), _small(key), _small(value)] for i, (key, value) in enumerate(pairs)]
        rows.append(["none", _small(found["baseline"]), _small(found["baseline"])])
        tables.append(markdown_table(["layer at 2 bits", "K, KL", "V, KL"], rows))
    return "\n\n".join(tables)


def tune_scores(results: Sequence[Result]) -> str:
    """Task scores of the answers that the chosen spec and its rivals give, held out."""
    tables = []
    for scores in (report["scores"] for report in results if report["scores"]):
        header = ["spec", *(f"{task}, {data['headline']}" for task, data in scores.items())]
        labels = dict.fromkeys(label for data in scores.values() for label in data["schemes"])
        rows = [
            [label, *(with_interval(d["schemes"][label][d["headline"]]) for d in scores.values())]
            for label in labels
        ]
        tables.append(markdown_table(header, rows))
    return "\n\n".join(tables)


def tune_page(report: Result, plot: str | None = None) -> str:
    """The page of one search: its tables and the plot."""
    sections = [
        f"# duotone tune: {report['settings']['model']['name']}",
        "`--scheme spec.json` gives every command the kept spec.",
        *(["\n".join(report["verdict"]["sentences"])] if "verdict" in report else []),
        *([f"![front]({plot})"] if plot else []),
        "## Held out",
        tune_table([report]),
        "## Published schemes, and what was found at no more bits",
        tune_comparisons([report]),
        *(["## Task scores, held out", tune_scores([report])] if report["scores"] else []),
        "## Sensitivity of the layers",
        tune_sensitivity([report]),
    ]
    return "\n\n".join(sections) + "\n"
