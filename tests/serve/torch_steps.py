"""Steps that an engine has on a GPU, in plain torch on a CPU: its metadata, numbers and order.

Without them an engine on a CPU does one request after the other by `pages.Chunk`. Import after
`engine.install`.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from duotone.serve import attention, decode, metadata, pages, short, windows
from duotone.serve.decode import DecodeStep
from duotone.serve.ragged import RaggedChunks

# Tokens of a window, of which a request has several, and rows of queries of a short chunk.
WINDOW, MOST_ROWS = 64, 32


def store(step: DecodeStep, pool: Tensor, key: Tensor, value: Tensor) -> None:
    """`DecodeStep.store` by `pages.append_tokens`."""
    numbers, count = step.numbers, len(key)
    where = (numbers.rings[:count], numbers.full[:count], numbers.position[:count])
    pages.append_tokens(key, value, pool, *where, step.layout)


def attend(
    step: DecodeStep, pool: Tensor, table: Tensor, query: Tensor, scale: float, out: Tensor
) -> None:
    """`DecodeStep.attend` by the numbers of the step alone."""
    layout, numbers = step.layout, step.numbers
    for n, (packed, dense) in enumerate(
        zip(numbers.packed[: len(table)].tolist(), numbers.dense.tolist(), strict=False)
    ):
        past = pages.read_pages(layout, pool, table[n, : packed // layout.tokens])
        opened = pages.read_ring(layout, pool, numbers.rings[n], packed, packed + dense)
        keys, values = (torch.cat(x) for x in zip(past, opened, strict=True))
        out[n] = pages.causal(query[n : n + 1], keys, values, scale)[0]


@contextmanager
def steps_of_a_gpu() -> Iterator[Counter]:
    """Let engines take these steps; yields how many layers have attended by each kind."""
    monkeypatch, seen = pytest.MonkeyPatch(), Counter()
    for module in (attention, metadata):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    monkeypatch.setattr(attention, "refusal", lambda layout: None)
    monkeypatch.setattr(attention, "flash", windows.attention)
    monkeypatch.setattr(decode, "reason_against", lambda *_: None)
    monkeypatch.setattr(windows, "WINDOW", WINDOW)
    monkeypatch.setattr(short, "MOST_ROWS", MOST_ROWS)
    monkeypatch.setattr(DecodeStep, "store", store)

    def counted(kind: str, call: Any) -> Any:
        def wrapped(given: Any, *args: Any) -> Any:
            seen[kind] += 1
            if kind == "chunks":
                step = given.step
                seen["short"] += step.short is not None
                seen["windows"] += len(step.windows) > 1
                seen["mixed"] += step.first > 0
            return call(given, *args)

        return wrapped

    monkeypatch.setattr(DecodeStep, "attend", counted("decode", attend))
    monkeypatch.setattr(RaggedChunks, "attend", counted("chunks", RaggedChunks.attend))
    try:
        yield seen
    finally:
        monkeypatch.undo()
