"""Markdown pages with marked tables, which are rewritten from results and never typed.

A table of a page stands between `<!-- duotone:NAME -->` and `<!-- /duotone:NAME -->`, each on a
line of its own, and is replaced as a whole. Short tables stand in README.md and docs/, long ones
in a README.md beside the results that they are made of.
"""

import re
from collections.abc import Mapping
from pathlib import Path

_MARKER = re.compile(r"^<!-- /?duotone:[\w-]+ -->$", re.M)
_MARKED = re.compile(
    r"(?P<open>^<!-- duotone:(?P<name>[\w-]+) -->\n)(?:(?!<!-- /?duotone:).)*?"
    r"(?P<close>^<!-- /duotone:(?P=name) -->$)",
    re.S | re.M,
)


def marked_pages(results: str | Path, repository: str | Path = ".") -> list[Path]:
    """Pages of a repository with a marked table: README.md, docs/*.md and all below `results`.

    Errors: ValueError where no page has one.
    """
    home = Path(repository)
    found = [home / "README.md", *sorted((home / "docs").glob("*.md"))]
    found += sorted(Path(results).rglob("*.md"))
    marked = [page for page in found if page.is_file() and _MARKER.search(_text(page))]
    if not marked:
        raise ValueError(
            "report must find <!-- duotone:NAME --> in README.md, in docs/*.md or in a page below "
            f"--results, got none in {str(home)!r} and {str(results)!r}. Name a page, or take "
            "--print, which shows the tables."
        )
    return marked


def update_text(text: str, rendered: Mapping[str, str]) -> str:
    """`text` with every marked table replaced.

    Errors: ValueError for a marker without results, and for one whose partner is missing.
    """

    def replace(match: re.Match) -> str:
        if match["name"] not in rendered:
            raise ValueError(
                f"every marked table needs results, got none for {match['name']!r}; there are "
                f"{sorted(rendered)}: run its benchmark or remove the marker"
            )
        return f"{match['open']}{rendered[match['name']]}\n{match['close']}"

    alone = _MARKER.search(_MARKED.sub("", text))
    if alone:
        raise ValueError(
            "markers must come in pairs, <!-- duotone:NAME --> and <!-- /duotone:NAME -->, got "
            f"{alone[0]} without its partner: add it or remove the marker"
        )
    return _MARKED.sub(replace, text)


def update_file(path: str | Path, rendered: Mapping[str, str], *, write: bool = True) -> bool:
    """Bring the marked tables of a page up to date; returns True if the page changed."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"a page must be an existing file, got {str(path)!r}")
    before = _text(path)
    try:
        after = update_text(before, rendered)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if write and after != before:
        path.write_text(after, encoding="utf-8")
    return after != before


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
