"""Perplexity through the cache by scheme, and what each ingredient buys at two bits.

    python benchmarks/text_table.py --model ../shared/data/stories260k \
        --data ../shared/data/stories260k/tinystories_ids.json --out results/text

Teacher-forced over all tokens, each predicted from the quantized past (`duotone.evaluate`), with
true bits of the caches as they were at the ends of the texts. Writes one new file, MODEL.json.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.evaluate import REFERENCE, evaluate_perplexity
from duotone.loading import load
from duotone.provenance import stamp, write_new_json
from duotone.tasks import read_passages
from duotone.tasks.metrics import paired_difference


def stream(key: TensorSpec, value: TensorSpec, **cache: Any) -> CacheSpec:
    """Everything in one stream."""
    return CacheSpec(visual="text", text=KVSpec(key, value), **cache)


def ingredients(window: int) -> dict[str, CacheSpec]:
    """{label: spec}: two bits, from round-to-nearest per token to everything at once."""
    token, block = TensorSpec(2, "channels"), TensorSpec(2, group=32)
    kivi = stream(block, token, recent=window)
    windows = {"recent": window, "sink": window // 4}

    def both(**fields: Any) -> CacheSpec:
        return stream(block.replace(**fields), token.replace(**fields), **windows)

    return {
        "per token": stream(token, token),
        "per token, window": stream(token, token, recent=window),
        "K along tokens (KIVI's axes)": stream(block, token),
        "KIVI's axes, window": kivi,
        "KIVI's axes, window, sinks": kivi.replace(**windows),
        "the same, lloyd": both(levels="lloyd"),
        "the same, eta .045": both(eta=0.045),
        "the same, symmetric": both(mapping="symmetric"),
        "the same, hybrid": both(mapping="hybrid"),
        "the same, hadamard": both(transform="hadamard"),
        "the same, normalised keys": kivi.replace(**windows, key_norm=True),
        "inner axes (InnerQ's), window, sinks": stream(token, block, **windows),
        "inner axes, hybrid, normalised keys": stream(
            *(t.replace(mapping="hybrid") for t in (token, block)), **windows, key_norm=True
        ),
    }


def published(window: int, depth: int) -> dict[str, CacheSpec]:
    """{label: spec}: the papers' schemes with their windows cut to `window` tokens."""
    half = depth // 2
    schemes = {
        "kivi @4": duotone.scheme("kivi", bits=4),
        "kivi @2": duotone.scheme("kivi", bits=2),
        "kivi @1": duotone.scheme("kivi", bits=1),
        "asymkv, K 2, V 1": duotone.scheme("asymkv"),
        "asymkv, half of K 2": duotone.scheme("asymkv", lk=half),
        "xquant, pairs of V": duotone.scheme("xquant", kq=depth, vq=half, km=depth, vm=half),
        "xquant without eta": duotone.scheme(
            "xquant", kq=depth, vq=half, km=depth, vm=half, eta1=0.0, eta2=0.0
        ),
        "xquant, pairs everywhere": duotone.scheme("xquant"),
        "innerq @2": duotone.scheme("innerq", bits=2),
        "innerq @2, symmetric": duotone.scheme("innerq", bits=2, mapping="symmetric"),
    }
    return {
        label: spec.replace(recent=window, sink=window // 4 if spec.sink else 0)
        for label, spec in schemes.items()
    }


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="token ids, .json")
    parser.add_argument("--n", type=int, help="documents, the first ones; all without it")
    parser.add_argument("--window", type=int, default=32, help="recent tokens of all schemes")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    loaded = load(arguments.model, arguments.device, torch.float32, with_processor=False)
    depth = loaded.model.config.get_text_config(decoder=True).num_hidden_layers
    specs = {**published(arguments.window, depth), **ingredients(arguments.window)}
    passages = read_passages(arguments.data, arguments.context)
    started = time.monotonic()
    evaluation = evaluate_perplexity(
        loaded.model, passages, specs, arguments.n, batch_size=arguments.batch_size
    )
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    name = Path(arguments.model).name
    write_new_json(arguments.out / f"{name}.json", table(evaluation, name, arguments, loaded))


def table(evaluation: Any, name: str, arguments: Any, loaded: Any) -> dict[str, Any]:
    """Perplexity, its difference from the unquantized model, bits and bytes of every scheme."""
    reference = evaluation.scores[REFERENCE]["perplexity"]
    rows = {}
    for label, result in evaluation.results.items():
        score = evaluation.scores[label]["perplexity"]
        rows[label] = {
            "perplexity": result["metrics"]["perplexity"],
            "difference": paired_difference(score, reference).to_dict(),
            "memory": result["memory"],
            "spec": result["configuration"]["spec"],
        }
        print(f"{label:44} {rows[label]['perplexity']['value']:.4f}", flush=True)
    return {
        "schema": "duotone.text/1",
        **stamp(loaded.model.device),
        "model": name,
        "dtype": "float32",
        "documents": next(iter(evaluation.results.values()))["samples"],
        "context": arguments.context,
        "window": arguments.window,
        "schemes": rows,
    }


if __name__ == "__main__":
    main()
