"""Hooks of mkdocs.yml: long tables, notebooks and project pages join the site; links follow.

Pages in docs/ link to files of the repository, as a reader of the repository needs it. The site
has docs/ at its top and the pages of OUTSIDE below it. A link to any other file becomes its path.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[2]
OUTSIDE = (
    *("results/**/*.md", "results/**/*.png", "notebooks/*.ipynb"),
    *("CONTRIBUTING.md", "CHANGELOG.md"),
)
NOTEBOOK, PAGE = ".ipynb", ".md"
LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)\)")
# The first point of a list right after a line of a paragraph, which Python-Markdown takes for words.
# Nothing is tried twice: a line that ends so is common, and may be long.
POINT = re.compile(r"^(?P<line>(?![ |>#-]|\d+\. )[^\S\n]*\S.*)\n(?=(?:- |1\. )\S)", re.M)
PICTURE = re.compile(r"^(?P<picture>!\[[^\]\n]*\]\((?P<file>[^()\s]+)\))$", re.M)
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
ROW = re.compile(r"^\|.*\|$", re.M)
# Columns of a table that needs the place of the table of contents.
MANY_COLUMNS = 6
LOADED = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)


def outside_files(root: Path = REPOSITORY) -> list[str]:
    """Paths of files outside docs/ that the site has, from the root."""
    found = [path for pattern in OUTSIDE for path in root.glob(pattern)]
    return sorted(path.relative_to(root).as_posix() for path in found)


def in_site(path: str) -> str:
    """Path in the site of a path in the repository; a notebook is a page."""
    path = path.removeprefix("docs/")
    return path.removesuffix(NOTEBOOK) + PAGE if path.endswith(NOTEBOOK) else path


def in_repository(uri: str, root: Path = REPOSITORY) -> str:
    """Path in the repository of a page of the site."""
    outside = {in_site(path): path for path in outside_files(root)}
    return outside.get(uri, f"docs/{uri}")


def text_of(path: Path) -> str:
    """Markdown of a page, or of a notebook: its cells, and after each what it shows."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != NOTEBOOK:
        return text
    return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _parts(cell))


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    for output in cell.get("outputs", ()):
        data = output.get("data", {"text/plain": output.get("text")})
        shown = "".join(data["text/plain"]).rstrip()
        png = data.get("image/png")
        yield f"![{shown}](data:image/png;base64,{png})" if png else f"```text\n{shown}\n```"


def titles(nav: list | dict) -> dict[str, str]:
    """{page: its title} of a navigation."""
    found: dict[str, str] = {}
    for part in nav if isinstance(nav, list) else [nav]:
        for title, below in part.items():
            found |= {below: title} if isinstance(below, str) else titles(below)
    return found


def follow(
    markdown: str, page: str, named: Mapping[str, str] | None = None, root: Path = REPOSITORY
) -> str:
    """Markdown of `page`, a path in the repository, with links as the site has them.

    named: titles by pages of the site, for links whose text is the name of a file.
    """
    here, outside = posixpath.dirname(page), set(outside_files(root))

    def replace(match: re.Match) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(here, target))
        if path.startswith("docs/") or path in outside:
            start = posixpath.dirname(in_site(page)) or "."
            moved = posixpath.relpath(in_site(path), start)
            text = match["text"]
            if text.endswith(".md"):
                text = (named or {}).get(in_site(path), text)
            return f"[{text}]({moved}{'#' + anchor if anchor else ''})"
        if not (root / path).exists():
            return match[0]
        return f"`{path}`" if match["text"] in path else f"{match['text']} (`{path}`)"

    return LINK.sub(replace, markdown)


def lists_apart(markdown: str) -> str:
    """Markdown with an empty line before each list, as CommonMark does not need it."""
    parts = FENCED.split(markdown)
    return "".join(p if p.startswith("```") else POINT.sub(r"\g<line>\n\n", p) for p in parts)


def pictures_open(markdown: str) -> str:
    """Markdown whose pictures are links to themselves: a phone shows them too small to read."""
    return PICTURE.sub(r"[\g<picture>](\g<file>)", markdown)


def is_wide(markdown: str) -> bool:
    """True for a page with a table of many columns."""
    return any(row.count("|") > MANY_COLUMNS for row in ROW.findall(markdown))


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files outside docs/."""
    from mkdocs.structure.files import File

    for path in outside_files():
        if path.endswith(NOTEBOOK):
            text = text_of(REPOSITORY / path)
            files.append(File.generated(config, in_site(path), content=text))
            continue
        source = os.fspath(REPOSITORY / path)
        files.append(File.generated(config, path, abs_src_path=source))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links follow the files, lists begin as on GitHub, and wide tables have their place."""
    here = in_repository(page.file.src_uri)
    if is_wide(markdown):
        page.meta["hide"] = ["toc"]
    return pictures_open(lists_apart(follow(markdown, here, titles(config.nav))))


def loaded_from_elsewhere(html: str) -> list[str]:
    """Addresses on other hosts from which a page loads scripts, styles or pictures."""
    return LOADED.findall(html)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that needs a network."""
    from mkdocs.exceptions import PluginError

    found = loaded_from_elsewhere(output)
    if found:
        raise PluginError(f"{page.file.src_uri}: a page must load nothing from elsewhere: {found}")
    return output
