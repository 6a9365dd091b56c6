"""The built site has what GitHub shows: MkDocs and CommonMark read some Markdown differently.

Needs the extra `docs`, as continuous integration has it after `make docs`.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dev.site import hooks

from paths import REPOSITORY

pytest.importorskip("mkdocs")
pytest.importorskip("material")
markdown_it = pytest.importorskip("markdown_it")
COUNTED = re.compile(r"<((?:li|ol|ul|pre|table|tr|blockquote)\b|ol start=\"\d+\")")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the site; a warning fails."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", out]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def counted(html: str) -> Counter[str]:
    """Numbers of lists, points, blocks and tables."""
    return Counter(COUNTED.findall(html))


def test_pages_have_the_blocks_that_github_shows(site: Path) -> None:
    reader = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")
    pages = [page.name for page in (REPOSITORY / "docs").glob("*.md") if page.name != "api.md"]
    pages += [page for page in hooks.outside_files() if page.endswith(".md")]
    different = {}
    for page in pages:
        source = (REPOSITORY / hooks.in_repository(page)).read_text(encoding="utf-8")
        built = page.replace("README.md", "index.html").replace(".md", ".html")
        html = (site / built).read_text(encoding="utf-8")
        article = html[html.index("<article") : html.index("</article>")]
        there, here = counted(reader.render(source)), counted(article)
        if there != here:
            different[page] = (there - here, here - there)
    assert not different


def test_the_reference_has_every_public_name(site: Path) -> None:
    import duotone

    html = (site / "api.html").read_text(encoding="utf-8")
    # Modules and values have no entry of their own.
    public = [name for name in dir(duotone) if callable(getattr(duotone, name))]
    assert not [name for name in public if not re.search(rf'id="duotone[\w.]*\.{name}"', html)]
