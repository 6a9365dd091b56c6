"""Passages of token ids, to be predicted token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .rows import file_rows, fingerprint, read_text, text_of

Ids = tuple[int, ...]
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Passages:
    """Documents, each in windows of at most `context` tokens that are read independently.

    documents: the units that an interval resamples. fingerprint: changes with the data.
    """

    documents: tuple[tuple[Ids, ...], ...]
    context: int
    fingerprint: str = ""

    def check_documents(self, count: int) -> None:
        """Raise unless there are that many documents."""
        if not 1 <= count <= len(self.documents):
            raise ValueError(
                f"samples must be between 1 and the data's {len(self.documents)} documents, "
                f"got {count}"
            )


def windows(ids: Sequence[int], context: int, start: Sequence[int] = ()) -> tuple[Ids, ...]:
    """`ids` cut into pieces of `context` tokens, `start` before each piece but the first.

    start: the token that the tokenizer puts before a text, if any; the first piece already has this
    token. A last piece with nothing to predict is dropped.
    """
    step = context - len(start)
    cut = [tuple(ids[:context])]
    cut += [(*start, *ids[i : i + step]) for i in range(context, len(ids), step)]
    return tuple(piece for piece in cut if len(piece) >= 2)


def read_passages(path: str | Path, context: int, encode: Encode | None = None) -> Passages:
    """Passages of a file.

    .json: a list of documents, each a list of token ids; needs no tokenizer. .jsonl: one document
    {"text": ...} per line. Any other suffix is plain text, where each window counts as a document.
    encode: text -> ids with the tokenizer's own special tokens, e.g. a first <s>.
    """
    path = Path(path)
    if context < 2:
        raise ValueError(f"context must be at least 2 tokens, got {context}; the first is given")
    if path.suffix == ".json":
        rows, digest = file_rows(path)
        documents = [windows(_checked(ids, where), context) for where, ids in rows.items()]
        return Passages(_filled(documents, path), context, digest)
    if encode is None:
        raise ValueError(
            f"text needs a tokenizer, got none for {path.name}; use a model folder that has one, "
            "or a .json file of token ids"
        )
    texts, digest = _texts(path)
    documents = [windows(ids := encode(text), context, _start(ids, encode)) for text in texts]
    if path.suffix != ".jsonl":
        documents = [(window,) for window in documents[0]]
    return Passages(_filled(documents, path), context, digest)


def _texts(path: Path) -> tuple[list[str], str]:
    if path.suffix == ".jsonl":
        rows, digest = file_rows(path)
        return [text_of(row, where) for where, row in rows.items()], digest
    text = read_text(path)
    return [text], fingerprint(text)


def _start(ids: Sequence[int], encode: Encode) -> Sequence[int]:
    """Tokens that the tokenizer puts before any text, found as the start of all texts."""
    empty = encode("")
    return empty[:1] if list(ids[: len(empty[:1])]) == list(empty[:1]) else ()


def _checked(ids: Any, where: str) -> Sequence[int]:
    ok = isinstance(ids, list) and len(ids) >= 2
    if not ok or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(
            f"each document must be a list of at least 2 token ids >= 0, got {str(ids)[:80]} in "
            f"{where}; text belongs into a .jsonl file of "
            '{"text": ...}'
        )
    return ids


def _filled(documents: Sequence[tuple[Ids, ...]], path: Path) -> tuple[tuple[Ids, ...], ...]:
    short = [i for i, document in enumerate(documents, start=1) if not document]
    if short or not documents:
        raise ValueError(
            f"every document must have at least 2 tokens, got fewer in document "
            f"{short[0] if short else 1} of {path.name}; drop it"
        )
    return tuple(documents)
