"""Table of `duotone evaluate` results (schema duotone.evaluate/1)."""

from collections.abc import Sequence

from duotone.report.markdown import Result, markdown_table, source, with_interval


def evaluation_table(results: Sequence[Result]) -> str:
    """One table per task, data and model; a row per result, by falling true bits."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(_title(result), []).append(result)
    return "\n\n".join(_table(title, groups[title]) for title in sorted(groups))


def _title(result: Result) -> str:
    """Name the table of a result: results of one task, model and split share it."""
    made = result["configuration"]
    parts = [made["task"], made["model"]["name"], f"{result['samples']} samples"]
    parts += [made["split"]] if "split" in made else []
    parts += ["question later"] if made.get("later_question") else []
    return ", ".join(parts)


def _table(title: str, results: Sequence[Result]) -> str:
    metrics = list(dict.fromkeys(name for result in results for name in result["metrics"]))
    ordered = sorted(results, key=lambda result: (-_bits(result), result["created"]))
    rows = [
        [
            result["configuration"]["scheme"],
            f"{_bits(result):.2f}",
            *(
                with_interval(result["metrics"][name]) if name in result["metrics"] else "-"
                for name in metrics
            ),
        ]
        for result in ordered
    ]
    table = markdown_table(["scheme", "true bits", *metrics], rows)
    return f"{title}:\n\n{table}\n\n*± half the 95 % bootstrap interval; {source(*results)}.*"


def _bits(result: Result) -> float:
    """True bits of pictures where they are counted apart, else of the whole cache."""
    memory = result["memory"]
    return memory.get("visual_bits_per_element") or memory["bits_per_element"]
