"""Every source, page or result that a comment, docstring or page names is in the repository.

The log (`dev/log/`) is exempt: it says what was.
"""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from paths import REPOSITORY

ROOMS = ("src", "tests", "benchmarks", "training", "docs", "dev", "notebooks", "results")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md", "SECURITY.md")
WRITTEN = (".py", ".cu", ".cuh", ".md", ".sh")
# JSON and pictures without a folder are what a command writes for its user. A name that begins
# with "/" or a shell's variable is no file of ours.
MENTION = re.compile(
    r"(?<![\w$])[\w./*-]*[\w*]\.(?:py|cuh?|md)\b"
    r"|(?<![\w/])(?:results|docs|benchmarks)/[\w./*-]*[\w*]\.(?:jsonl?|png|svg)\b"
)
# Files of other projects, and the page that `duotone tune` writes for its user.
ELSEWHERE = {"kv_cache_utils.py", "modeling_llama_pyramidinfer.py", "report.md"}
# Files that a test writes, or has as a wrong example.
MADE_UP = {
    "tests/report/test_generate_tables.py": {"page.md"},
    "tests/report/test_pages.py": {
        *("docs/*.md", "docs/one.md", "docs/words.md", "docs/gone.md", "one.md", "words.md"),
        *("results/quality/a.json", "tables/__init__.py"),
    },
    "tests/report/test_local.py": {"shown/__init__.py", "results/a.json"},
    "tests/test_flow_page.py": {"gone.py", "hf/gone.py"},
    "tests/test_circles.py": {"one.py", "two.py"},
    "tests/test_site.py": {
        *("docs/a.md", "gone.md", "one.md", "two.md"),
        *("notebooks/1-first-steps.md", "1-first-steps.md"),
    },
    "tests/test_snippets.py": {"page.md"},
    "tests/test_words.py": {"KERNELS.md"},
}


def kept_files(root: Path) -> list[str]:
    """Paths of all files in the rooms, and of the pages at the top, from the root."""
    found = [path for room in ROOMS for path in (root / room).rglob("*") if path.is_file()]
    found += [root / page for page in PAGES if (root / page).is_file()]
    return [path.relative_to(root).as_posix() for path in found if "__pycache__" not in path.parts]


def mentions(text: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each file that a text names; Markdown's escaped star is a star."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in MENTION.finditer(line.replace("\\*", "*")):
            if not match[0].startswith("/"):
                yield number, match[0]


def is_there(name: str, known: list[str]) -> bool:
    """True where a file's path ends like the name, which may have stars."""
    end = re.sub(r"^(\.{1,2}/)+", "", name)
    return any(fnmatch(f"/{path}", f"*/{end}") for path in known)


def absent(root: Path) -> list[str]:
    """Mentions of files that are not there, as `page:line: name`."""
    known = kept_files(root)
    found = []
    for page in known:
        if not page.endswith(WRITTEN) or page.startswith("dev/log/"):
            continue
        exempt = ELSEWHERE | MADE_UP.get(page, set())
        for number, name in mentions((root / page).read_text(encoding="utf-8")):
            if name not in exempt and not is_there(name, known):
                found.append(f"{page}:{number}: {name}")
    return found


def test_every_file_that_is_named_is_there() -> None:
    here = Path(__file__).relative_to(REPOSITORY).as_posix()
    assert not [line for line in absent(REPOSITORY) if not line.startswith(f"{here}:")]


def test_a_file_that_is_gone_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "src" / "spans").mkdir(parents=True)
    (tmp_path / "src" / "spans" / "decode.cu").write_text("// as span_decode.cu, `../gone.md`\n")
    (tmp_path / "src" / "a.py").write_text("# spans/decode.cu, rotate/decode.cu, out.json\n")
    (tmp_path / "CHANGELOG.md").write_text("results/a\\*.json, src/*.py, /usr/b.py, $made.py\n")
    assert sorted(absent(tmp_path)) == [
        "CHANGELOG.md:1: results/a*.json",
        "src/a.py:1: rotate/decode.cu",
        "src/spans/decode.cu:1: ../gone.md",
        "src/spans/decode.cu:1: span_decode.cu",
    ]
