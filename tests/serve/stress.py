"""Random requests to an engine on a CPU: prefix hits, chunks, preemption, `n`, cancellation.

    PYTHONPATH=src PYTHON tests/serve/stress.py --requests 10000 --seconds 900

--steps takes the steps that an engine has on a GPU, in plain torch. Each answer must equal
transformers' own, and all blocks must come back.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASES, NEWEST = 96, 48


@dataclass
class Seen:
    """Counts of a run. wrong: (prompt, expected, got) of answers that differ."""

    answered: int = 0
    cancelled: int = 0
    wrong: list[tuple[int, list[int], list[int]]] = field(default_factory=list)


def prompts(draw: random.Random) -> list[list[int]]:
    """Prompts of 1 to 260 tokens; most go on from a part of an earlier one."""
    found: list[list[int]] = []
    while len(found) < BASES:
        start = draw.choice(found) if found and draw.random() < 0.7 else []
        start = start[: draw.randrange(len(start) + 1)]
        more = [draw.randrange(3, 320) for _ in range(draw.randrange(1, 130))]
        found.append((start + more)[:260])
    return found


def run(llm: Any, given: list[list[int]], want: list[list[int]], count: int, end: float) -> Seen:
    """Ask until `count` requests or the time `end`, then let all end."""
    from vllm import SamplingParams

    draw, engine, seen = random.Random(1), llm.llm_engine, Seen()
    live: dict[str, int] = {}
    sent = 0
    while live or (sent < count and time.monotonic() < end):
        while sent < count and len(live) < 24 and draw.random() < 0.6 and time.monotonic() < end:
            at, twice = draw.randrange(len(given)), draw.random() < 0.1
            params = SamplingParams(
                max_tokens=draw.randrange(1, NEWEST),
                n=2 if twice else 1,
                temperature=1.0 if twice else 0.0,
                top_k=1,
                detokenize=False,
                ignore_eos=True,
            )
            engine.add_request(str(sent), {"prompt_token_ids": given[at]}, params)
            live[str(sent)] = at
            sent += 1
        if live and draw.random() < 0.05:
            left = draw.choice([*live])
            engine.abort_request([left])
            del live[left]
            seen.cancelled += 1
        for output in engine.step():
            if output.finished and output.request_id in live:
                _check(seen, live.pop(output.request_id), output, want)
    while engine.has_unfinished_requests():
        engine.step()
    return seen


def _check(seen: Seen, at: int, output: Any, want: list[list[int]]) -> None:
    seen.answered += 1
    for said in output.outputs:
        tokens = list(said.token_ids)
        if tokens != want[at][: len(tokens)]:
            seen.wrong.append((at, want[at][: len(tokens)], tokens))


def main() -> None:
    """Run with exact pages; the last line says what happened."""
    options = argparse.ArgumentParser()
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--seconds", type=float, default=900)
    options.add_argument("--blocks", type=int, default=44)
    options.add_argument("--steps", action="store_true", help="a GPU's, in plain torch")
    options.add_argument("--engine", type=json.loads, default={}, help="options of the engine")
    given = options.parse_args()

    from engine import engine, install, tiny_llama

    install()
    from exact import exact_pages, own, watched
    from torch_steps import steps_of_a_gpu

    model = tiny_llama(Path(tempfile.mkdtemp()) / "llama")
    asked = prompts(random.Random(0))
    want = own(model, asked, NEWEST)
    sizes = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True, "max_num_seqs": 8}
    with (
        exact_pages(),
        steps_of_a_gpu() if given.steps else nullcontext(),
        engine(
            model,
            "duotone_2bit",
            num_gpu_blocks_override=given.blocks,
            **sizes | given.engine,
        ) as llm,
    ):
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        before, counts = pool.get_num_free_blocks(), watched(llm)
        seen = run(llm, asked, want, given.requests, time.monotonic() + given.seconds)
        leaked = before - pool.get_num_free_blocks()
    print(
        f"{seen.answered} answered, {seen.cancelled} cancelled, {len(seen.wrong)} wrong, "
        f"{counts['preempted']} preempted, {counts['hits']} tokens of hits, {leaked} blocks leaked"
    )
    sys.exit(bool(seen.wrong or leaked))


if __name__ == "__main__":
    main()
