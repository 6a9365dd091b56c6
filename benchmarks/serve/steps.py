"""Prompts and decode steps of vLLM on random weights of a known shape, one cache dtype at a time.

    PYTHONPATH=src:. python -m benchmarks.serve.steps bf16 --at 32x4096 --out results/serve/steps

`--at BxT` sends B prompts of T tokens at once. A step is the time between two answers of the engine
while all B requests decode; prompts count until the last one's first token. The engine is the
default one, in a process of its own, unless --no-compile leaves torch.compile and the graphs of
prompts out. Qwen 3.5 where flashinfer is missing: --engine '{"gdn_prefill_backend": "triton"}'.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from duotone.bench.serve import ROWS
from duotone.report.provenance import stamp, write_new_json

# {name: layers, hidden size, intermediate size, heads, kv heads, vocabulary}; 128 channels a head.
SHAPES = {
    "llama-8b": (32, 4096, 14336, 32, 8, 128256),
    "llama-8b, half": (16, 4096, 14336, 32, 8, 128256),
    "tiny": (2, 512, 512, 4, 2, 512),
}
HYBRID = "qwen3.5-9b"  # transformers' default config has the shape
STEPS, SPARE = 64, 64
# Of vLLM's scheduler, at least.
TOKENS_AT_ONCE = 8192
NO_COMPILE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def save_config(shape: str, folder: Path, longest: int) -> None:
    """A Llama of random weights, or Qwen 3.5's language model."""
    from transformers import LlamaConfig

    if shape == HYBRID:
        from transformers import Qwen3_5TextConfig

        given = {"max_position_embeddings": longest, "architectures": ["Qwen3_5ForCausalLM"]}
        Qwen3_5TextConfig(**given, dtype="bfloat16").save_pretrained(folder)
        return
    layers, hidden, inner, heads, kv_heads, vocabulary = SHAPES[shape]
    LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=longest,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)


def options_of(row: str) -> dict[str, Any]:
    """Arguments of the engine, from those of the server."""
    given = ROWS[row]
    return {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(given[::2], given[1::2], strict=True)
    }


def answer_tokens(batch: int, tokens: int) -> int:
    """Tokens of an answer: those that come first decode while other prompts are read."""
    return STEPS + SPARE + batch * tokens // TOKENS_AT_ONCE


def decode(engine: Any, batch: int, tokens: int, seed: int) -> dict[str, Any]:
    """Times of `batch` prompts of `tokens` tokens each, and the first ids of the first answer."""
    from vllm import SamplingParams

    draw = torch.Generator().manual_seed(seed)
    limit = engine.model_config.get_vocab_size() - 1
    most = answer_tokens(batch, tokens)
    params = SamplingParams(max_tokens=most, temperature=0, detokenize=False, ignore_eos=True)
    start, arrivals, first = time.perf_counter(), [], None
    for at in range(batch):
        ids = torch.randint(3, limit, (tokens,), generator=draw).tolist()
        engine.add_request(f"{seed}-{at}", {"prompt_token_ids": ids}, params)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found = engine.step()
        answers |= {x.request_id: list(x.outputs[0].token_ids) for x in found}
        counts = [len(ids) for ids in answers.values()]
        if len(found) == batch and max(counts) < most:
            first = time.perf_counter() if first is None else first
            arrivals.append((time.perf_counter(), sum(counts) / batch))
    (begin, before), (end, after) = arrivals[0], arrivals[-1]
    gaps = [b[0] - a[0] for a, b in pairwise(arrivals)]
    return {
        "batch": batch,
        "tokens": tokens,
        "prompts_s": first - start,
        "step_ms": (end - begin) / (after - before) * 1e3,
        "step_p50_ms": median(gaps) * 1e3,
        "steps": len(gaps),
        "answer": answers[f"{seed}-0"][:8],
    }


def measure(
    row: str,
    shape: str,
    sizes: Sequence[tuple[int, int]],
    compiles: bool,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fields of the result of one engine; options: more arguments of it."""
    from vllm import LLM

    longest = max(tokens + answer_tokens(batch, tokens) for batch, tokens in sizes) + SPARE
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        save_config(shape, Path(folder), longest)
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=max(batch for batch, _ in sizes),
            enable_prefix_caching=False,
            **({} if compiles else {"compilation_config": NO_COMPILE}),
            **options_of(row),
            **(options or {}),
        )
    engine = llm.llm_engine
    cache = engine.vllm_config.cache_config
    found = {"row": row, "shape": shape, "compiles": compiles, "longest": longest}
    found |= {"start_s": time.perf_counter() - began, "block_size": cache.block_size}
    found |= {"blocks": cache.num_gpu_blocks, "options": dict(options or {}), "rows": []}
    decode(engine, *sizes[0], seed=0)
    for seed, (batch, tokens) in enumerate(sizes, 1):
        found["rows"].append(decode(engine, batch, tokens, seed))
        print(row, found["rows"][-1], flush=True)
    return found


def main() -> None:
    """Measure one row, and write its file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", choices=sorted(ROWS))
    parser.add_argument("--shape", choices=sorted({*SHAPES, HYBRID}), default="llama-8b")
    parser.add_argument("--at", action="append", required=True, help="BATCHxTOKENS")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON of more arguments")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sizes = [tuple(map(int, at.split("x"))) for at in args.at]
    found = measure(args.row, args.shape, sizes, not args.no_compile, args.engine)
    import vllm

    header = {"schema": "duotone.serve-steps/1"}
    header |= stamp("cuda" if torch.cuda.is_available() else "cpu")
    header["versions"]["vllm"] = vllm.__version__
    parts = [args.shape.replace(", ", "-"), args.row, *["eager"] * args.no_compile, *args.at]
    name = "-".join(parts)
    write_new_json(args.out / f"{name}.json", {**header, **found})


if __name__ == "__main__":
    main()
