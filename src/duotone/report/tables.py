"""Result files to Markdown tables; numbers of a page come from here and are never typed.

Imports no room and needs neither a GPU nor a model. `report.pages` puts the tables into pages.
Tables of commands are here; a repository names those of its own benchmarks in pyproject.toml
(`report.local`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from duotone.report.budget import budget_summary, budget_table
from duotone.report.evaluations import evaluation_table
from duotone.report.files import read_file, result_files
from duotone.report.generate import generate_summary, generate_table
from duotone.report.kernels import (
    kernel_speedups,
    kernel_summary,
    kernel_table,
    packing_table,
    step_table,
)
from duotone.report.local import Renderer, local_renderers
from duotone.report.markdown import Result
from duotone.report.serve import serve_summary, serve_table
from duotone.report.tune import (
    tune_comparisons,
    tune_sensitivity,
    tune_summary,
    tune_table,
)

# {name of the table: (schema of its result files, function that renders them)}
RENDERERS: dict[str, Renderer] = {
    "evaluations": ("duotone.evaluate/1", evaluation_table),
    "generate": ("duotone.generate/1", generate_table),
    "generate-budget": ("duotone.generate-budget/1", budget_table),
    "generate-budget-summary": ("duotone.generate-budget/1", budget_summary),
    "generate-summary": ("duotone.generate/1", generate_summary),
    "kernels": ("duotone.kernels/1", kernel_table),
    "kernels-speedups": ("duotone.kernels/1", kernel_speedups),
    "kernels-summary": ("duotone.kernels/1", kernel_summary),
    "kernels-packing": ("duotone.kernels/1", packing_table),
    "kernels-steps": ("duotone.kernels/1", step_table),
    "serve": ("duotone.serve/1", serve_table),
    "serve-summary": ("duotone.serve/1", serve_summary),
    "tune": ("duotone.tune/1", tune_table),
    "tune-summary": ("duotone.tune/1", tune_summary),
    "tune-comparisons": ("duotone.tune/1", tune_comparisons),
    "tune-sensitivity": ("duotone.tune/1", tune_sensitivity),
}


def read_results(folder: Path) -> list[Result]:
    """All results below `folder` that name their schema, by path and line.

    Errors: ValueError for a folder that is missing and for what is no JSON, with file and line.
    """
    if not folder.is_dir():
        raise ValueError(f"--results must be an existing folder, got {str(folder)!r}")
    found = (data for path in result_files(folder) for data in read_file(path))
    return [data for data in found if isinstance(data, dict) and "schema" in data]


def _render(render: Callable[[Sequence[Result]], str], schema: str, mine: list[Result]) -> str:
    try:
        return render(mine)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"results of schema {schema!r} must have its fields; got {len(mine)} of them, one of "
            f"which has not: {type(error).__name__} {error}. Write it anew."
        ) from error


def tables(folder: str | Path, repository: str | Path = ".") -> dict[str, str]:
    """{name: Markdown} of every table there are results for.

    repository: a folder whose pyproject.toml may name renderers of its own.
    """
    results = read_results(Path(folder))
    rendered = {}
    for name, (schema, render) in {**local_renderers(Path(repository)), **RENDERERS}.items():
        mine = [result for result in results if result["schema"] == schema]
        if mine:
            rendered[name] = _render(render, schema, mine)
    return rendered
