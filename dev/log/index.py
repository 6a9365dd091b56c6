"""Rewrite the index in README.md beside this file: the titles of all entries, newest first.

python dev/log/index.py
"""

import re
from pathlib import Path

HERE = Path(__file__).parent


def anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def entries(file: Path) -> list[str]:
    lines = []
    for title in re.findall(r"^## (\d{4}-.*)$", file.read_text(encoding="utf-8"), re.MULTILINE):
        date, _, words = title.partition(": ")
        lines.append(f"- {date}: [{words}]({file.name}#{anchor(title)})")
    return lines


def main() -> None:
    path = HERE / "README.md"
    parts = re.split(r"(?m)^(?=## )", path.read_text(encoding="utf-8"))
    for at, part in enumerate(parts):
        if named := re.match(r"## \[(\w+\.md)\]", part):
            head = part.splitlines()[0]
            parts[at] = "\n".join([head, "", *entries(HERE / named[1]), "", ""])
    path.write_text("".join(parts).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
