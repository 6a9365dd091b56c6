"""Answers that go on: a model continues text without ends and without special tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_tokens(model: Any, never: Sequence[int]) -> Iterator[None]:
    """Inside, `generate` writes none of these tokens, and takes no setting of the checkpoint.

    An end token does not end an answer there: it is one of them, or a token like others. Without
    any tokens nothing changes.
    """
    if not never:
        yield
        return
    own = model.generation_config
    given = type(own)(pad_token_id=0 if own.pad_token_id is None else own.pad_token_id)
    given.suppress_tokens = list(never)
    model.generation_config = given
    try:
        yield
    finally:
        model.generation_config = own
