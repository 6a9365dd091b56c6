"""Results of an evaluation as a table."""

from typing import Any


def show_results(results: dict[str, dict[str, Any]]) -> None:
    """Print one column per scheme, or one row per scheme where there are many."""
    from rich.console import Console
    from rich.table import Table

    first = next(iter(results.values()))
    columns = _columns(results)
    if len(columns) > len(columns[0]):  # many schemes: one row each
        columns = [list(row) for row in zip(*columns, strict=True)]
    title = f"{first['configuration']['task']}, {first['samples']} samples, 95 % intervals"
    table = Table(*(column[0] for column in columns), title=title, title_justify="left")
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*row)
    Console().print(table)


def _columns(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """One list of cells per scheme, headed by its name, after one list of row names."""
    metrics = list(dict.fromkeys(name for r in results.values() for name in r["metrics"]))
    columns = [["", "true bits", *metrics]]
    for label, result in results.items():
        memory = result["memory"]
        bits = memory.get("visual_bits_per_element") or memory["bits_per_element"]
        cells = [_cell(result["metrics"].get(name)) for name in metrics]
        columns.append([label, f"{bits:.2f}", *cells])
    return columns


def _cell(interval: dict[str, float] | None) -> str:
    if interval is None:
        return "-"
    return f"{interval['value']:.3f} [dim]{interval['low']:.3f}..{interval['high']:.3f}[/]"
