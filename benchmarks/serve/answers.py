"""Answers of the embedded model about held-out pictures: served by vLLM, and held in memory.

    PYTHONPATH=src:. python -m benchmarks.serve.answers --out results/serve/answers

Both are asked in 16 bit and with an equal spec of few bits, and twice: the second time the question
comes after the pictures. vLLM then finds whole pages of each prompt as prefix hits. Each engine
runs in a process of its own; --engine has more options for all of them, in JSON.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import duotone
from benchmarks.serve.compared import DENSE, Answers, Side, compared
from benchmarks.serve.served_tiny import served_tiny
from benchmarks.serve.steps import options_of
from duotone.inference.batch import (
    ask_later,
    decode_answers,
    encode,
    generate,
    make_cache,
    prepare,
)
from duotone.loading import load
from duotone.report.provenance import stamp, write_new_json
from duotone.serve.plugin import DTYPES
from duotone.tasks import TASKS, Example, Task

# Objects that captions name: other scores of theirs need a package that servers lack.
ASKED = TASKS | {
    "captions": replace(TASKS["captions"], metrics=("objects",), headline="object_recall")
}
MOST_PICTURES, LONGEST, CACHE_BYTES = 4, 2048, 2 << 30
SCHEMA = "duotone.serve-answers/1"


def examples_of(tasks: Sequence[str], samples: int) -> dict[str, list[Example]]:
    """Held-out examples of each task."""
    return {name: [ASKED[name].example(n) for n in range(samples)] for name in tasks}


def spec_of(bits: int) -> duotone.CacheSpec:
    """The spec in memory whose codes equal those of pages."""
    return duotone.scheme("duotone-stream", bits=bits).replace(sink=0, recent=0)


def asked(llm: Any, processor: Any, task: Task, examples: Sequence[Example]) -> Answers:
    """Greedy answers of an engine."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=task.max_new_tokens, temperature=0)
    form = {"add_generation_prompt": True, "tokenize": False}
    prompts = [
        {
            "prompt": processor.apply_chat_template(example.messages(), **form),
            "multi_modal_data": {"image": list(example.images)},
        }
        for example in examples
    ]
    found = [x.outputs[0] for x in llm.generate(prompts, params, use_tqdm=False)]
    return [(list(x.token_ids), x.text.strip()) for x in found]


def served(
    options: dict[str, Any], tasks: Sequence[str], samples: int
) -> tuple[dict[str, Any], dict[str, Answers], dict[str, Answers]]:
    """Facts of an engine, its answers per task, and its answers to equal prompts after those."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process is its own already
    from transformers import AutoProcessor
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        model = str(served_tiny(Path(folder) / "duotone-tiny"))
        llm = LLM(
            model=model,
            model_impl="transformers",  # vLLM's own Qwen 2 has no head_dim
            max_model_len=LONGEST,
            limit_mm_per_prompt={"image": MOST_PICTURES},
            kv_cache_memory_bytes=CACHE_BYTES,
            **options,
        )
        processor, examples = AutoProcessor.from_pretrained(model), examples_of(tasks, samples)
        rounds = [
            {name: asked(llm, processor, ASKED[name], x) for name, x in examples.items()}
            for _ in range(2)
        ]
    cache = llm.llm_engine.vllm_config.cache_config
    facts = {"options": options, "block_size": cache.block_size, "blocks": cache.num_gpu_blocks}
    return facts, *rounds


def held(
    loaded: Any, spec: Any, task: Task, examples: Sequence[Example], batch_size: int, later: bool
) -> Answers:
    """Greedy answers of transformers, on its own cache (None) or on a `QuantizedCache`."""
    answers: Answers = []
    for first in range(0, len(examples), batch_size):
        messages = [x.messages() for x in examples[first : first + batch_size]]
        batch = prepare(loaded.model, encode(loaded.processor, messages))
        batch = ask_later(batch) if later else batch
        cache = make_cache(loaded.model, spec, batch)
        ids = generate(loaded.model, batch, cache, task.max_new_tokens).token_ids
        answers += zip(ids, decode_answers(loaded.processor, ids), strict=True)
    return answers


def ask_all(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, dict[Side, Answers]]]:
    """Facts of both engines, and answers of each task by side."""
    examples = examples_of(args.tasks, args.samples)
    found: dict[str, dict[Side, Answers]] = {name: {} for name in examples}
    engines = {}
    for width, own in ((DENSE, {}), (args.row, options_of(args.row))):
        options = {"dtype": args.dtype, **own, **args.engine}
        # The process gives all memory back.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            given = (options, args.tasks, args.samples)
            engines[width], *rounds = process.submit(served, *given).result()
        for later, answers in enumerate(rounds):
            for name in examples:
                found[name][Side(True, bool(later), width)] = answers[name]
    loaded = load(dtype=getattr(torch, args.dtype))
    for width, spec in ((DENSE, None), (args.row, spec_of(DTYPES[args.row]))):
        for later in (False, True):
            for name, asked_for in examples.items():
                given = (ASKED[name], asked_for, args.batch_size, later)
                found[name][Side(False, later, width)] = held(loaded, spec, *given)
    return engines, found


def main() -> None:
    """Ask all sides, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", choices=sorted(DTYPES), default="duotone_2bit")
    parser.add_argument("--tasks", nargs="+", choices=sorted(ASKED), default=sorted(ASKED))
    parser.add_argument("--samples", type=int, default=64, help="of each task")
    parser.add_argument("--batch-size", type=int, default=16, help="in memory")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import vllm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    header = {"schema": SCHEMA} | stamp(device)
    header["versions"]["vllm"] = vllm.__version__
    header |= {"row": args.row, "dtype": args.dtype, "samples": args.samples}
    engines, found = ask_all(args)
    header |= {"engines": engines, "spec": json.loads(spec_of(DTYPES[args.row]).to_json())}
    examples = examples_of(args.tasks, args.samples)
    rows = [compared(ASKED[name], examples[name], sides) for name, sides in found.items()]
    for row in rows:
        print(row["task"], json.dumps({x: row[x] for x in ("scores", "pairs")}, indent=1))
    write_new_json(args.out / f"{args.row}-{args.dtype}-{device}.json", {**header, "rows": rows})


if __name__ == "__main__":
    main()
