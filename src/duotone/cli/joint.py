"""`duotone tune --memory`: weights and a cache for all memory of a card."""

from pathlib import Path
from typing import Any

from .card import parse_bytes
from .common import load_model, megabytes, print_json, progress_bars


def check_alone(given: dict[str, Any]) -> None:
    """Raise ValueError for options of memory without --memory. given: {option: value}."""
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if named:
        raise ValueError(
            f"{' and '.join(named)} belong to a search under all memory of a card; add --memory "
            "24GB, or leave these out"
        )


def run_joint(
    memory: str,
    reserve: str | None,
    weights: list[str] | None,
    load: dict[str, int | None],
    alone: dict[str, Any],
    settings: dict[str, Any],
    tasks: list[Any],
    model: str | None,
    device: str | None,
    out: Path,
    limits: tuple[int | None, float | None],
    json_output: bool,
) -> None:
    """Search for a pair and show it. load: sequences and tokens. limits: trials and minutes.

    alone: options that only caches alone have. settings: other fields of `JointSettings`.
    """
    from duotone.joint import JointSettings, make_joint, make_report, write_report

    _check(load, alone)
    sizes = {"memory_bytes": parse_bytes(memory)}
    sizes |= {} if reserve is None else {"reserve_bytes": parse_bytes(reserve)}
    chosen = {"weights": tuple(weights)} if weights else {}
    made = JointSettings(**sizes, **load, **chosen, **settings)
    with progress_bars() as progress:
        joint = make_joint(lambda: load_model(model, device), tasks, made, out, progress)
        pairs = joint.search(*limits)
        report = make_report(joint, pairs)
    files = write_report(report, out)
    if json_output:
        print_json(report)
    else:
        _show(report, files, model)


def _check(load: dict[str, int | None], alone: dict[str, Any]) -> None:
    missing = [f"--{name}" for name, value in load.items() if value is None]
    if missing:
        raise ValueError(
            f"a memory is for so many sequences of so many tokens; {' and '.join(missing)} "
            "missing, e.g. --sequences 16 --tokens 4096"
        )
    named = [f"--{name.replace('_', '-')}" for name, value in alone.items() if value is not None]
    if named:
        raise ValueError(
            f"--memory says what caches may take and keeps the nearest pair; {' and '.join(named)} "
            "does not go with it. Leave one out"
        )


def _show(report: dict[str, Any], files: list[Path], model: str | None) -> None:
    """Show a row per recipe, the kept pair, and its use."""
    from rich.console import Console
    from rich.table import Table

    from duotone.loading import EMBEDDED

    console, kept = Console(), report["kept"]
    columns = ("weights", "bytes", "bits", "KL alone", "cache", "KL", "in all")
    table = Table(*columns, title="held out", title_justify="left")
    table.columns[4].no_wrap = True
    for row in report["rows"]:
        table.add_row(*_cells(row))
    console.print(table)
    for row in report["rows"]:
        if row["why"]:
            console.print(f"{row['recipe']}: {row['why']}.", markup=False, soft_wrap=True)
    for sentence in report["sentences"]:
        console.print(sentence, style="bold", markup=False, soft_wrap=True)
    console.print("Written: " + ", ".join(str(file) for file in files), soft_wrap=True)
    name = kept["folder"] or model or EMBEDDED
    console.print(f"Use it:  duotone compare --model {name} --scheme {files[0]}", soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str]:
    if row["why"]:
        return [row["recipe"], megabytes(row["weights_bytes"]), "", "", "none", "", ""]
    left = "16 bit" if row["is_dense"] else f"{row['bits']:.2f}"
    sizes = [megabytes(row[name]) for name in ("weights_bytes", "bytes")]
    weights_kl, kl = (f"{row[name]:.2g}" for name in ("weights_kl", "kl"))
    return [row["recipe"], sizes[0], left, weights_kl, row["cache"], kl, sizes[1]]
