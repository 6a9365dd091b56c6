"""Tables of the benchmarks: each stands on a page of the repository."""

import re

from benchmarks import RENDERERS
from duotone.report.pages import marked_pages

from paths import REPOSITORY


def test_every_table_stands_on_a_page():
    pages = marked_pages(REPOSITORY / "results", REPOSITORY)
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert set(re.findall(r"<!-- duotone:([\w-]+) -->", text)) >= set(RENDERERS)
