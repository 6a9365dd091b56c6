"""Decode steps of hybrid models at real shapes: ms per token and bytes of the caches.

    python -m benchmarks.supports.hybrids SHAPE --out FILE.json

Random weights of a shape take the time of trained ones. One sequence reads its prompt in pieces;
its cache is repeated for a batch, as for several answers about one document. Each row then asks
`model.generate` for the next tokens.
"""

import argparse
import json
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers

import duotone
from duotone.bench.budget import begin_peak, end_peak, release
from duotone.bench.generate_rows import Row
from duotone.hf.model.cache_argument import CACHE
from duotone.inference.memory import cache_memory
from duotone.inference.random_models import marked_prompt, random_model_of
from duotone.inference.stopping import StepClock
from duotone.loading import image_token_ids
from duotone.report.provenance import stamp

SCHEMA = "duotone.hybrids/1"
METHOD = (
    "model.generate, greedy, words alone; a prompt is read once in pieces, its cache repeated for "
    "the batch; median time between tokens after the first ones; cache bytes at the end"
)
WARM_TOKENS, PIECE = 16, 4096
# {name: (model type, fields)}. Qwen3.5-9B is the default text config of its type; Gemma 4 31B's
# fields are written from memory and give 30.7e9 parameters.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-9b": ("qwen3_5", {"text_config": {"max_position_embeddings": 131072}}),
    "gemma4-31b": (
        "gemma4",
        {
            "text_config": {
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_hidden_layers": 60,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 256,
                "global_head_dim": 512,
                "num_global_key_value_heads": 4,
                "attention_k_eq_v": True,
                "sliding_window": 1024,
                "hidden_size_per_layer_input": 0,
                "final_logit_softcapping": 30.0,
            }
        },
    ),
    "tiny": (
        "qwen3_5",
        {
            "text_config": {
                "vocab_size": 300,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
            },
            "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
            "image_token_id": 290,
            "video_token_id": 291,
            "vision_start_token_id": 292,
            "vision_end_token_id": 293,
        },
    ),
}


def measure(
    model: Any, row: Row, tokens: int, batches: list[int], new_tokens: int
) -> Iterator[dict[str, Any]]:
    """Rows of one way to call `generate`, by ascending batch; the first that fails is the last.

    batches: each a multiple of the one before.
    """
    given, _ = marked_prompt(model, 1, tokens)
    batch = 1
    at = {"row": row.name, "tokens": tokens}
    with row.block(model) as opened, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", category=duotone.SlowPathWarning)
        try:
            begin = perf_counter()
            made = _read(model, given["input_ids"])
            at["read_s"] = perf_counter() - begin
            for batch in batches:
                ids, cache = _repeated(made, batch)
                found, made = _timed(model, ids, cache, new_tokens)
                del cache
                notes = {str(w.message) for w in said if w.category is duotone.SlowPathWarning}
                held = _bytes(made[CACHE], opened)
                yield {**at, "batch": batch, **found, **held, "notes": sorted(notes)}
        # Caches of others raise anything; a table does not end with one row.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            yield {**at, "batch": batch, "failed": True, "reason": reason}


def _read(model: Any, ids: torch.Tensor) -> Any:
    """The call that has read all tokens, after earlier ones with a piece each.

    `prefill_chunk_size` of transformers 5.17 breaks on positions in three dimensions.
    """
    cache = None
    for stop in [*range(PIECE, ids.shape[1], PIECE), ids.shape[1]]:
        made = _generate(model, ids[:, :stop], cache, 1)
        cache = made[CACHE]
    return made


def _repeated(made: Any, batch: int) -> tuple[torch.Tensor, Any]:
    """Ids and cache of a call, with its first sequence in all rows of a batch."""
    ids, cache = made.sequences, made[CACHE]
    if len(ids) != batch:
        cache.reorder_cache(torch.zeros(batch, dtype=torch.long, device=ids.device))
        ids = ids[:1].expand(batch, -1).contiguous()
    return ids, cache


def _timed(
    model: Any, ids: torch.Tensor, cache: Any, new_tokens: int
) -> tuple[dict[str, Any], Any]:
    base, clock = begin_peak(model.device), StepClock(model.device)
    made = _generate(model, ids, cache, new_tokens, clock)
    steps_ms = [1e3 * (b - a) for a, b in pairwise(clock.times_s)]
    peak = end_peak(model.device, base)
    return {"ms_per_token": median(steps_ms[WARM_TOKENS:]), "peak_bytes": peak}, made


def _generate(
    model: Any, ids: torch.Tensor, cache: Any, new_tokens: int, *watching: StepClock
) -> Any:
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE: cache},
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        stopping_criteria=list(watching),
    )


def _bytes(cache: Any, opened: Any) -> dict[str, int]:
    """Bytes of the cache at the end; inside `enable`, also of the model's own."""
    if opened is None:
        return {"cache_bytes": int(cache_memory(cache)["total_bytes"])}
    report = opened.memory()
    return {"cache_bytes": report.total_bytes, "own_cache_bytes": report.dense_equivalent_bytes}


def main() -> None:
    """Write all rows of a shape, after each prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--row", action="append", default=[])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 65536])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    model_type, fields = SHAPES[asked.shape]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model_of(config, device, dtype)
    model.generation_config = type(model.generation_config)(pad_token_id=0)
    model.generation_config.suppress_tokens = list(image_token_ids(config)) or None
    result = {
        "schema": SCHEMA,
        **stamp(device),
        "method": METHOD,
        "model": asked.shape,
        "new_tokens": asked.new_tokens,
        "rows": [],
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for tokens in asked.tokens:
        for name in asked.row or ["plain", "kivi@2", "duotone-mixed@2"]:
            for row in measure(model, Row.parse(name), tokens, asked.batch, asked.new_tokens):
                print(json.dumps(row), flush=True)
                result["rows"].append(row)
            release()
            asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
