"""Result files to Markdown tables; numbers in a README come from here and are never typed.

Imports no room and needs neither a GPU nor a model. A table of a README stands between
`<!-- duotone:NAME -->` and `<!-- /duotone:NAME -->` and is replaced as a whole. Tables of commands
are here; a repository names the tables of its own benchmarks in pyproject.toml (`report.local`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from duotone.report.files import read_file, result_files
from duotone.report.generate import generate_summary, generate_table
from duotone.report.kernels import innerq_table, kernel_summary, kernel_table, packing_table
from duotone.report.local import Renderer, local_renderers
from duotone.report.markdown import Result
from duotone.report.throughput import prediction_table, throughput_table
from duotone.report.tune import tune_comparisons, tune_scores, tune_sensitivity, tune_table

_MARKED = re.compile(
    r"(?P<open><!-- duotone:(?P<name>[\w-]+) -->\n).*?(?P<close><!-- /duotone:(?P=name) -->)", re.S
)
# {name of the table: (schema of its result files, function that renders them)}
RENDERERS: dict[str, Renderer] = {
    "generate": ("duotone.generate/1", generate_table),
    "generate-summary": ("duotone.generate/1", generate_summary),
    "kernels": ("duotone.kernels/1", kernel_table),
    "kernels-summary": ("duotone.kernels/1", kernel_summary),
    "kernels-innerq": ("duotone.kernels/1", innerq_table),
    "kernels-packing": ("duotone.kernels/1", packing_table),
    "throughput": ("duotone.throughput/1", throughput_table),
    "throughput-predictions": ("duotone.throughput/1", prediction_table),
    "tune": ("duotone.tune/1", tune_table),
    "tune-comparisons": ("duotone.tune/1", tune_comparisons),
    "tune-scores": ("duotone.tune/1", tune_scores),
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


def update_text(text: str, rendered: Mapping[str, str]) -> str:
    """`text` with every marked table replaced; a marker without results raises ValueError."""

    def replace(match: re.Match) -> str:
        if match["name"] not in rendered:
            raise ValueError(
                f"every marked table needs results, got none for {match['name']!r}; there are "
                f"{sorted(rendered)}: run its benchmark or remove the marker"
            )
        return f"{match['open']}{rendered[match['name']]}\n{match['close']}"

    return _MARKED.sub(replace, text)


def update_file(path: str | Path, rendered: Mapping[str, str], *, write: bool = True) -> bool:
    """Bring the marked tables of a file up to date; returns True if the file changed."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"--readme must be an existing file, got {str(path)!r}")
    before = path.read_text(encoding="utf-8")
    after = update_text(before, rendered)
    if write and after != before:
        path.write_text(after, encoding="utf-8")
    return after != before
