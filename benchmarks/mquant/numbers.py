"""Memory of a 7B model by recipe, and what a static scale per modality saves; CPU, a minute.

    python -m benchmarks.mquant.numbers --out DIR      memory.json, modality.json

memory: weights of Qwen2-VL-7B's shapes (MQuant's Tables 3 and 11). modality: one static activation
scale against one per modality on duotone-tiny's own activations, plain and rotated; scales are the
calibration split's absolute maxima, errors the held-out split's. Text rows are those of prompts.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from duotone.hf.weights.checkpoint import empty_model
from duotone.hf.weights.equivalences import Equivalences, apply_equivalences
from duotone.hf.weights.weight_maps import weight_map
from duotone.inference.batch import encode
from duotone.loading import image_token_ids, load
from duotone.report.provenance import stamp, write_new_json
from duotone.tasks import TASKS
from duotone.weights.equivalences.hadamard import plan_hadamard
from duotone.weights.equivalences.module_map import Stream, WeightMap, at
from duotone.weights.equivalences.online import RotatedInput
from duotone.weights.equivalences.residual import reading_linears

from .random_model import config

GROUP = 128
SAMPLES = 4
MODALITIES = ("visual", "text")


def linear_bytes(out: int, columns: int, recipe: str, split: bool) -> int:
    """Bytes of a linear's weight: codes, scales and, for W4A8, what RMS keeps in 16 bit.

    W4A16: a 16-bit scale per group of 128; W4A8: a float32 scale per output channel, two static
    activation scales, padded columns and w0 at down_proj / fc2.
    """
    if recipe == "bf16":
        return 2 * out * columns
    if recipe == "W4A16":
        return out * columns // 2 + 2 * out * -(-columns // GROUP)
    padded = plan_hadamard(columns).padded if split else columns
    return out * padded // 2 + 4 * out + 8 + (2 * out if split else 0)


def quantized_linears(found: WeightMap) -> dict[str, str]:
    """Path -> part of everything that is quantized: all linears but the head."""
    parts = {}
    for stream in found.streams:
        inner = [path for block in stream.blocks for b in block.branches for path in _of(b)]
        parts |= dict.fromkeys(inner, stream.name)
        outer = [*reading_linears(stream), *stream.writers]
        parts |= {path: "projector" for path in outer if path not in parts}
    return {path: part for path, part in parts.items() if path != found.head}


def _of(branch: Any) -> tuple[str, ...]:
    return (*branch.inputs, branch.output)


def memory_rows(model: nn.Module, found: WeightMap) -> list[dict[str, Any]]:
    """Bytes of each part of a model's weights under each recipe; every parameter counts once."""
    parts = {p: name for p, name in quantized_linears(found).items() if _is_linear(model, p)}
    split = {block.mlp_output for stream in found.streams for block in stream.blocks}
    rows = []
    for recipe in ("bf16", "W4A16", "W4A8"):
        count: dict[str, int] = defaultdict(int)
        for path, part in parts.items():
            shape = at(model, path).weight.shape
            count[part] += linear_bytes(*shape, recipe, path in split)
        for name, parameter in model.named_parameters():
            path, _, kind = name.rpartition(".")
            if not (path in parts and kind == "weight"):
                kept = {found.embedding: "embedding", found.head: "head"}.get(path, "other, 16 bit")
                count[kept] += 2 * parameter.numel()
        rows.append({"recipe": recipe, **count, "total": sum(count.values())})
    return rows


def _is_linear(model: nn.Module, path: str) -> bool:
    return isinstance(at(model, path), nn.Linear)


def memory_7b() -> list[dict[str, Any]]:
    """`memory_rows` of Qwen2-VL-7B's shapes, without storage."""
    model = empty_model(config(tiny=False, layers=None), torch.bfloat16)
    return memory_rows(model, weight_map(model))


def hooked(model: nn.Module, stream: Stream) -> dict[tuple[int, str], nn.Module]:
    """(layer, linear) -> the module whose input is quantized there."""
    found = {}
    for layer, block in enumerate(stream.blocks):
        for branch in block.branches:
            for path in (branch.inputs[0], branch.output):
                module = at(model, path)
                inner = module.linear if isinstance(module, RotatedInput) else module
                found[layer, path.rpartition(".")[2]] = inner
    return found


def inputs_of(loaded: Any, stream: Stream, split: str) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """(place, activations [tokens, channels], visual [tokens]) of every sample and linear."""
    seen: dict[Any, Tensor] = {}
    handles = []
    for place, module in hooked(loaded.model, stream).items():

        def keep(module: nn.Module, args: tuple, place: Any = place) -> None:
            seen[place] = args[0].flatten(0, -2)

        handles.append(module.register_forward_pre_hook(keep))
    try:
        for task in ("captions", "documents"):
            for index in range(SAMPLES):
                batch = encode(loaded.processor, [TASKS[task].example(index, split).messages()])
                with torch.no_grad():
                    loaded.model(**batch)
                ids = torch.tensor(image_token_ids(loaded.model.config))
                visual = torch.isin(batch["input_ids"].flatten(), ids)
                yield from ((place, x, visual) for place, x in seen.items())
    finally:
        for handle in handles:
            handle.remove()


def static_ranges(loaded: Any, stream: Stream) -> dict[Any, dict[str, float]]:
    """Largest magnitude of each modality at each linear, on the calibration split."""
    peaks: dict[Any, dict[str, float]] = defaultdict(lambda: dict.fromkeys(MODALITIES, 0.0))
    for place, x, visual in inputs_of(loaded, stream, "calibration"):
        for name, rows in (("visual", x[visual]), ("text", x[~visual])):
            peaks[place][name] = max(peaks[place][name], float(rows.abs().max()))
    return dict(peaks)


def modality_rows(rotated: bool) -> list[dict[str, Any]]:
    """SQNR of 8-bit activations per linear and modality, with one scale and with two."""
    loaded = load(device="cpu", dtype=torch.float32)
    if rotated:
        apply_equivalences(loaded.model, Equivalences(attention_output=True))
    stream = weight_map(loaded.model).stream("language")
    peaks = static_ranges(loaded, stream)
    signal, noise = defaultdict(float), defaultdict(float)
    for place, x, visual in inputs_of(loaded, stream, "heldout"):
        for name, rows in (("visual", x[visual]), ("text", x[~visual])):
            signal[place, name] += float(rows.double().square().sum())
            for scales, peak in (("one", max(peaks[place].values())), ("two", peaks[place][name])):
                noise[place, name, scales] += _noise(rows, peak)
    return [_modality_row(place, rotated, peaks[place], signal, noise) for place in peaks]


def _noise(x: Tensor, peak: float) -> float:
    scale = peak / 127
    return float((x - (x / scale).round().clamp(-127, 127) * scale).double().square().sum())


def _modality_row(
    place: Any, rotated: bool, peaks: dict[str, float], signal: Any, noise: Any
) -> dict[str, Any]:
    row = {"layer": place[0], "linear": place[1], "rotated": rotated}
    for name in MODALITIES:
        row[f"{name}_peak"] = peaks[name]
        for scales in ("one", "two"):
            ratio = torch.tensor(signal[place, name] / noise[place, name, scales])
            row[f"{name}_sqnr_db_{scales}"] = float(10 * torch.log10(ratio))
    return row


TABLES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "memory": memory_7b,
    "modality": lambda: modality_rows(rotated=False) + modality_rows(rotated=True),
}


def main() -> None:
    """Write all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    out = parser.parse_args().out
    for name, rows in TABLES.items():
        path = write_new_json(
            out / f"{name}.json",
            {"schema": f"duotone.mquant.{name}/1", **stamp("cpu"), "rows": rows()},
        )
        print(path, flush=True)


if __name__ == "__main__":
    main()
