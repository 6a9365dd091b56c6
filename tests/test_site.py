"""The site has every page once, and links lead somewhere.

`make docs` builds it and takes warnings as errors. Only the test of docstrings needs what that
installs.
"""

import json
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dev.site import drawings, hooks

from paths import REPOSITORY

# Words of docs/, tables included; pages of results have the long tables.
MOST_OF_A_PAGE, MOST_OF_ALL = 2_500, 25_000
CONFIG = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))


def pages(nav: list | dict | str) -> Iterator[str]:
    """Pages of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
        return
    for part in nav.values() if isinstance(nav, dict) else nav:
        yield from pages(part)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as Python-Markdown makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    plain = (unicodedata.normalize("NFKD", h).encode("ascii", "ignore").decode() for h in headings)
    kept = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in plain)
    return {re.sub(r"[-\s]+", "-", heading) for heading in kept}


def dead_links(page: Path, root: Path = REPOSITORY) -> Iterator[str]:
    """Links of a page to files or headings that are not there."""
    for match in hooks.LINK.finditer(hooks.text_of(page)):
        target, _, anchor = match["target"].partition("#")
        if ":" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        is_there = file.exists() and (
            not anchor or anchor in anchors(file.read_text(encoding="utf-8"))
        )
        if not is_there:
            yield f"{page.relative_to(root)}: {match['target']}"


def test_the_navigation_has_every_page_once() -> None:
    there = [path.name for path in (REPOSITORY / "docs").glob("*.md")]
    outside = (path for path in hooks.outside_files() if path.endswith((".md", ".ipynb")))
    there += map(hooks.in_site, outside)
    assert Counter(pages(CONFIG["nav"])) == Counter(there)


def test_pages_are_short() -> None:
    (results,) = (part["Results"] for part in CONFIG["nav"] if "Results" in part)
    docs = set((REPOSITORY / "docs").glob("*.md")) - {
        REPOSITORY / "docs" / page for page in pages(results)
    }
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in docs}
    assert not {page: n for page, n in words.items() if n > MOST_OF_A_PAGE}
    assert sum(words.values()) <= MOST_OF_ALL


@pytest.mark.parametrize("page", list(pages(CONFIG["nav"])))
def test_no_link_is_dead(page: str) -> None:
    assert not list(dead_links(REPOSITORY / hooks.in_repository(page)))


def test_a_dead_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text(
        "# One thing\n[a](two.md) [b](#one-thing) [c](#two) `[d](e)`\n"
    )
    assert list(dead_links(tmp_path / "one.md", tmp_path)) == [
        "one.md: two.md",
        "one.md: #two",
        "one.md: e",
    ]


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("docs/a.md", "[b](quality.md#x)", "[b](quality.md#x)"),
        ("docs/a.md", "[b](#x)", "[b](#x)"),
        ("docs/a.md", "[b](https://c.org)", "[b](https://c.org)"),
        ("docs/a.md", "[b](gone.md)", "[b](gone.md)"),
        ("docs/a.md", "[b](../src/gone)", "[b](../src/gone)"),
        ("docs/a.md", "[b](../results/tune/README.md)", "[b](results/tune/README.md)"),
        ("docs/a.md", "![b](../results/tune/duotone-tiny/front.png)", None),
        ("docs/a.md", "[b](../notebooks/1-first-steps.ipynb)", "[b](notebooks/1-first-steps.md)"),
        ("notebooks/a.ipynb", "[b](1-first-steps.ipynb)", "[b](1-first-steps.md)"),
        ("notebooks/a.ipynb", "[b](../docs/tune.md#x)", "[b](../tune.md#x)"),
        ("docs/a.md", "[the log](../dev/log/quality.md)", "the log (`dev/log/quality.md`)"),
        ("docs/a.md", "[LOG.md](../LOG.md)", "`LOG.md`"),
        ("CONTRIBUTING.md", "[b](docs/quality.md)", "[b](quality.md)"),
        ("results/tune/README.md", "[b](../../docs/tune.md#x)", "[b](../../tune.md#x)"),
        ("results/tune/README.md", "[b](../quality/README.md)", "[b](../quality/README.md)"),
    ],
)
def test_links_follow_files_into_the_site(page: str, link: str, expected: str | None) -> None:
    assert hooks.follow(link, page) == (expected or link.replace("../", "", 1))


def test_a_link_by_the_name_of_a_file_gets_its_title() -> None:
    named = hooks.titles([{"Help": [{"Quality": "quality.md"}, {"More": [{"Search": "tune.md"}]}]}])
    assert named == {"quality.md": "Quality", "tune.md": "Search"}
    link = "[quality.md](quality.md#x) [words](quality.md)"
    assert hooks.follow(link, "docs/a.md", named) == "[Quality](quality.md#x) [words](quality.md)"


def test_a_notebook_is_a_page_with_code_and_what_it_shows(tmp_path: Path) -> None:
    shown = {"data": {"text/plain": ["<picture>"], "image/png": "AAAA"}}
    code = {"cell_type": "code", "source": ["x = 1\n", "x"], "outputs": [{"text": ["1\n"]}, shown]}
    cells = [{"cell_type": "markdown", "source": ["# One\n", "thing"]}, code]
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": cells}))
    assert hooks.text_of(tmp_path / "one.ipynb") == (
        "# One\nthing\n\n```python\nx = 1\nx\n```\n\n```text\n1\n```\n\n"
        "![<picture>](data:image/png;base64,AAAA)"
    )


def test_a_page_of_the_repository_has_its_place_in_the_site() -> None:
    for page in pages(CONFIG["nav"]):
        assert hooks.in_site(hooks.in_repository(page)) == posixpath.normpath(page)


def test_a_list_begins_right_after_a_paragraph() -> None:
    page = "words:\n- one\n  more\n- two\n\nsteps:\n1. one\n2. two\n```\nx\n- y\n```\n| a |\n- z\n"
    assert hooks.lists_apart(page) == page.replace("words:", "words:\n").replace(
        "steps:", "steps:\n"
    )


def test_a_picture_opens_by_itself() -> None:
    page = "![a b](img/c.png)\nwords ![d](e.png)\n"
    assert hooks.pictures_open(page) == "[![a b](img/c.png)](img/c.png)\nwords ![d](e.png)\n"


def test_a_table_of_many_columns_is_wide() -> None:
    assert hooks.is_wide("words\n\n| a | b | c | d | e | f |\n")
    assert not hooks.is_wide("| a | b | c | d | e |\n`a | b | c | d | e | f | g`\n")


def test_what_is_loaded_from_elsewhere_is_noticed() -> None:
    page = (
        '<a href="https://a.org"><script src=https://b.org/x></script><img alt="" src="//c.org/y">'
    )
    assert hooks.loaded_from_elsewhere(page) == ["https://b.org/x", "//c.org/y"]
    assert not hooks.loaded_from_elsewhere('<link href="assets/x.css"><img src="img/y.png">')


def test_items_of_docstrings_become_points() -> None:
    pytest.importorskip("griffe")
    from dev.site.docstrings import listed

    text = "Do it: at once.\n\nname: words, and\nmore. a, b: both. No item: here.\nErrors: none."
    assert listed(text) == (
        "Do it: at once.\n\n- `name`: words, and more.\n- `a`, `b`: both. No item: here.\n"
        "- Errors: none."
    )
    assert listed("One.\n\n    x: a formula") == "One.\n\n    x: a formula"


def test_drawings_are_what_their_script_draws() -> None:
    for name, draw in drawings.DRAWINGS.items():
        assert (drawings.OUT / name).read_text(encoding="utf-8") == draw()
