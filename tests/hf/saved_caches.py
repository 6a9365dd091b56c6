"""Caches to save, and what tests do with files of them."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import duotone
from duotone import CacheSpec, Eviction, KVSpec, QuantizedCache, TensorSpec
from duotone.quant import LayerRule, Sharing
from duotone.tools.digest import digest

from families import inputs, tiny_model

EIGHT, TWO = TensorSpec(8), TensorSpec(2)
STREAM = KVSpec(TensorSpec(2, group=4), TensorSpec(2, along="channels", group=8))
VISUAL = CacheSpec(visual=KVSpec(EIGHT, EIGHT))
MIXED = CacheSpec(visual=KVSpec(EIGHT, TensorSpec(8, "channels")), text=STREAM, sink=2, recent=3)
HYBRID = KVSpec(
    TensorSpec(4, group=4, mapping="hybrid"), TensorSpec(4, "channels", mapping="hybrid")
)
# Each has a kind of tensor or store that the others have not.
SPECS = {
    "mixed": MIXED.replace(ranges="run"),
    "hybrid": MIXED.replace(text=HYBRID, key_norm=True, sink=0),
    "symmetric": VISUAL.replace(visual=KVSpec(TensorSpec(2, mapping="symmetric"), TWO)),
    "classes": VISUAL.replace(visual=KVSpec(TensorSpec(classes=((4, 1 / 8), (2, 1 / 4))), TWO)),
    "8-bit parameters": VISUAL.replace(
        visual=KVSpec(TensorSpec(classes=((4, 1 / 8), (2, 1 / 4)), param_dtype="float8"), TWO)
    ),
    "background": VISUAL.replace(background=KVSpec(TensorSpec(1), TensorSpec(1))),
    "parted runs": MIXED.replace(background=KVSpec(TWO, TensorSpec(1)), ranges="run", tau=(0, 1)),
    "evicting": MIXED.replace(evict=Eviction(0.5)),
    "shared": MIXED.replace(share=Sharing(key=0, value=1)),
    "averaged": MIXED.replace(
        share=Sharing(key=0, value=0, layers=3, dominant=1, weights=(0.2, 0.5, 0.3))
    ),
    "layers": MIXED.replace(layers=(LayerRule(1, 2, visual=KVSpec(TWO, TWO)),)),
    "lagging": MIXED.replace(
        text=KVSpec(STREAM.key, STREAM.value.replace(lag=7)), recent=0, flush=4
    ),
    "factors": MIXED.replace(
        text=KVSpec(
            TensorSpec(2, group=4, factors="norm"),
            TensorSpec(2, "channels", tile=4, factors="balanced"),
        )
    ),
    "codebook": MIXED.replace(
        text=KVSpec(
            TensorSpec(2, group=4, mapping="symmetric", codebook="gaussian"),
            TensorSpec(2, "channels", group=8, clip=0.9, ends="deviations"),
        )
    ),
    "heads": VISUAL.replace(
        visual=KVSpec(TWO.replace(jensen=True), TensorSpec(2, "span", heads="all"))
    ),
    "dense": duotone.scheme("dense"),
}


def filled(model: PreTrainedModel, spec: CacheSpec, name: str = "internvl") -> QuantizedCache:
    """A ragged batch of three, a few steps behind the prompt."""
    given = inputs(name, [[3, "image", 9, "image", 14], [11, "image", 2], [7]])
    cache, mask = QuantizedCache(model, spec), given["attention_mask"]
    with torch.no_grad():
        model(**given, past_key_values=cache)
        for token in range(5, 8):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            ids = torch.full((3, 1), token)
            model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    return cache


def next_logits(model: PreTrainedModel, cache: QuantizedCache) -> Tensor:
    """Logits of a next token that sees everything, also padding, which is stored nowhere."""
    batch, seen = cache.timeline.batch, cache.length
    with torch.no_grad():
        out = model(
            input_ids=torch.full((batch, 1), 7),
            attention_mask=torch.ones(batch, seen + 1, dtype=torch.long),
            past_key_values=copy.deepcopy(cache),
        )
    return out.logits[:, -1]


def saved(
    path: Path, spec: CacheSpec = SPECS["mixed"], model: PreTrainedModel | None = None
) -> tuple[PreTrainedModel, Tensor]:
    """(model, next logits) of a cache in the file `path`. model: a tiny one by default."""
    model = model or tiny_model("internvl")
    cache = filled(model, spec)
    cache.save(path)
    return model, next_logits(model, cache)


def content(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(header, tensors) of one of our files."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["duotone"])
    return header, load_file(path)


def rewrite(
    path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None], signed: bool = True
) -> None:
    """Edit header and tensors in place. signed: with the checksum that belongs to the result."""
    header, tensors = content(path)
    change(header, tensors)
    if signed:
        header.pop("checksum", None)
        header["checksum"] = digest(tensors, header)
    save_file(tensors, path, metadata={"duotone": json.dumps(header)})
