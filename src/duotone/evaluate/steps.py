"""Steps in which several tokens are read at once and give what single tokens give.

A token sees in codes the tokens that have left the window before it. With n tokens in the stream
(sink and window left out) these are

    packed(n) = group * floor(max(0, n - sink - recent) / group)

Tokens of one step see the packed past of the first of them, and each other in 16 bit. So a step
equals single ones exactly where packed(n) is the same for all of it: from one flush to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duotone import CacheSpec, KVSpec


def flush_steps(
    spec: CacheSpec | None,
    tokens: int,
    *,
    prompt: int = 0,
    streamed: Sequence[int] = (0,),
    longest: int | None = None,
) -> Iterator[slice]:
    """Steps over `tokens` tokens that equal one step of `prompt` tokens and single steps after it.

    streamed: tokens of each sequence's stream after the prompt. longest: tokens of a step after the
    prompt; None: any number.
    A cache flushes after several tokens and before a single one. Where a flush is due after a
    single token, the next token is read alone. Without a quantized text nothing is flushed, and
    the prompt is read with the tokens after it. Where a cache shows tokens of one step otherwise
    than generated ones, every step after the prompt is a single one. So it is under `lag`, where
    each token sees other exact V.
    """
    longest = tokens if longest is None else longest
    streams = spec is not None and isinstance(spec.text, KVSpec)
    lags = spec is not None and any(tensor.lag for tensor in spec.tensors)
    if lags or (spec is not None and spec.tells_phases_apart):
        longest = 1
    elif not streams:
        prompt = 0

    def packed(place: int) -> list[int]:
        if not streams:
            return []
        window, group = spec.sink + spec.recent, spec.flush_tokens
        return [max(0, n + place - prompt - window) // group * group for n in streamed]

    if prompt:
        yield slice(0, prompt)
    start, single = prompt, prompt == 1
    while start < tokens:
        due = single and packed(start) != packed(start - 1)
        end = start + 1 if due else min(start + longest, tokens)
        stop = start + 1
        while stop < end and packed(stop) == packed(start):
            stop += 1
        yield slice(start, stop)
        start, single = stop, stop - start == 1
