"""Griffe extension of mkdocs.yml: items of a docstring, `name: words`, become points of a list."""

import re

import griffe

NAMES = r"[a-z_*][\w*]*(?:, [a-z_*][\w*]*)*|Errors"
# At the beginning of a line, or after the full stop of the item before it.
ITEM = re.compile(rf"(?:\n *|(?<=[.;]) )(?P<name>{NAMES}): (?=\S)")


def listed(text: str) -> str:
    """A docstring in Markdown, paragraph by paragraph; indented ones are formulas or code."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(p if p.startswith("    ") else _points(p) for p in paragraphs)


def _points(paragraph: str) -> str:
    before, *items = ITEM.split("\n" + paragraph)
    pairs = zip(items[::2], items[1::2], strict=True)
    points = [f"- {_name(name)}: {' '.join(words.split())}" for name, words in pairs]
    return "\n\n".join(part for part in (before.strip("\n"), "\n".join(points)) if part)


def _name(name: str) -> str:
    return name if name == "Errors" else ", ".join(f"`{part}`" for part in name.split(", "))


class Items(griffe.Extension):
    """Rewrite docstrings as they are loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
