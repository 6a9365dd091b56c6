"""What calibrated bases cost: time of a decode step's transforms, and a calibration at 8B size.

    python benchmarks/transform_cost.py --out DIR [--part decode|calibration]   a file of each part

Decode: attention to packed spans in two parts, with and without bases, against the best of the
16-bit backends, at (32, 32, 8, 8192); rotated times as `duotone bench kernel` has them. With 128
tokens in 16 bit beside them as well: outputs of both are then merged behind the basis.
Calibration: `duotone.calibrate` on random weights of InternVL2.5-8B's language model with a small
vision tower, sequences of 3,328 visual tokens.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from duotone.attention import decode_attention
from duotone.bench.baselines import BASELINES, UnavailableError, quiet
from duotone.bench.problems import (
    Problem,
    bytes_of,
    copy_of,
    random_dense,
    random_packed,
    random_query,
)
from duotone.bench.rows import DenseRow, laid_out
from duotone.bench.shapes import Shape
from duotone.bench.timing import CudaClock, Work, measure, rotated_count
from duotone.cache import PackedSegment
from duotone.calibrate import CalibrationBatch, Settings, calibrate
from duotone.loading import Loaded
from duotone.quant import TensorSpec
from duotone.quant.bases import Bases
from duotone.report.provenance import stamp, write_new_json

SHAPE = Shape(32, 32, 8, 8192)
FRONT_SHARE = 0.45
# A calibration's widths at a mean of about one bit, in units of 16 of 128 channels.
FRONT = (((4, 1 / 4), (2, 3 / 8), (1, 1 / 4)), ((4, 1 / 8), (2, 1 / 4), (1, 1 / 4)))
BACK = (((2, 1 / 8), (1, 1 / 8)), ((1, 1 / 8),))
IMAGE, TILES, TILE_TOKENS = 5, 13, 256


def packed(classes: Sequence, tokens: int, bases: str | None, device: Any) -> PackedSegment:
    """Random codes of one part of the spans."""
    made = []
    for widths, which in zip(classes, ("key", "value"), strict=True):
        transform = None if bases is None else f"klt:{bases}#0.{which}"
        plain = TensorSpec(classes=widths)
        tensor = random_packed(SHAPE.batch, SHAPE.kv_heads, tokens, 128, plain, device)
        made.append(replace(tensor, spec=plain.replace(transform=transform)))
    lengths = torch.full((SHAPE.batch,), tokens, device=device)
    return PackedSegment(*made, lengths, True)


def problem(bases: str | None, window: int, device: Any) -> Problem:
    """Both parts, and `window` tokens in 16 bit."""
    front = int(FRONT_SHARE * SHAPE.tokens)
    segments = [packed(FRONT, front, bases, device)]
    segments.append(packed(BACK, SHAPE.tokens - front, bases, device))
    segments += [random_dense(SHAPE, window, device)] if window else []
    query = random_query(SHAPE, device)
    return laid_out(Problem(query, tuple(segments), SHAPE.head_dim**-0.5))


def calls(one: Problem) -> list[Work]:
    """The attention of copies that together outgrow L2."""
    free, _ = torch.cuda.mem_get_info()
    count = rotated_count(bytes_of(one).total, free)
    copies = [one, *(copy_of(one) for _ in range(count - 1))]
    return [
        lambda p=p: decode_attention(p.query, p.segments, sm_scale=p.sm_scale, impl="cuda")
        for p in copies
    ]


def best_dense_us(clock: CudaClock) -> tuple[str, float]:
    """The fastest 16-bit backend that runs here and does not compile for long."""
    found = {}
    for baseline in BASELINES:
        if baseline.bits != 16 or baseline.compiled:
            continue
        row = DenseRow(baseline)
        try:
            with quiet():
                copies = [row.call(row.problem(SHAPE, clock.device)) for _ in range(4)]
                for run in copies:
                    run()
                found[baseline.name] = measure(copies, clock, 20)["rotated"]
        except UnavailableError:
            continue
    return min(found.items(), key=lambda pair: pair[1])


def decode_cost(clock: CudaClock) -> dict[str, Any]:
    """Microseconds with and without bases."""
    shape = (1, SHAPE.kv_heads, 128, 128)
    torch.manual_seed(0)
    both = torch.eye(128) + 0.05 * torch.randn(2, *shape)
    name, dense_us = best_dense_us(clock)
    result: dict[str, Any] = {"best_16_bit": name, "best_16_bit_us": dense_us}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "bases.safetensors")
        Bases(*both, {}).save(file)
        for window in (0, 128):
            times = {}
            for label, bases in (("plain", None), ("bases", file)):
                work = calls(problem(bases, window, clock.device))
                for run in work:
                    run()
                times[label] = measure(work, clock, 20)["rotated"]
                del work
                torch.cuda.empty_cache()
            extra = times["bases"] - times["plain"]
            row = times | {"extra_us": extra, "extra_share_of_16_bit": extra / dense_us}
            result[f"window {window}"] = row
            print(window, row, flush=True)
    return result


def large_model(layers: int) -> Any:
    """Random weights of InternVL2.5-8B's language model behind a small vision tower."""
    import transformers

    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": [448, 448], "patch_size": [14, 14]}
    text = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
    text |= {"num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8}
    text |= {"head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 8192}
    text |= {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=TILE_TOKENS
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def large_batches(count: int) -> list[CalibrationBatch]:
    """Sequences of 3,328 visual tokens with a question of 64."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        words = torch.randint(10, 32000, (1, 68), generator=generator)
        pictures = torch.full((1, TILES * TILE_TOKENS), IMAGE)
        ids = torch.cat([words[:, :4], pictures, words[:, 4:]], 1)
        pixels = torch.randn(TILES, 3, 448, 448, generator=generator)
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        made.append(CalibrationBatch(tensors | {"pixel_values": pixels.bfloat16()}, 16))
    return made


def calibration_cost(layers: int, sequences: int) -> dict[str, Any]:
    """Seconds, and bytes above the model."""
    model, batches = large_model(layers), large_batches(sequences)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    model_bytes, started = torch.cuda.memory_allocated(), time.monotonic()
    calibrate(Loaded("random 8B", model, None), batches, Settings(bits=1.0))
    torch.cuda.synchronize()
    row = {
        "layers": layers,
        "sequences": sequences,
        "visual_tokens_per_sequence": TILES * TILE_TOKENS,
        "seconds": time.monotonic() - started,
        "model_bytes": model_bytes,
        "bytes_above_model": torch.cuda.max_memory_allocated() - model_bytes,
    }
    print(row, flush=True)
    return row


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=36)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("decode", "calibration"), help="default: both")
    arguments = parser.parse_args()
    clock = CudaClock()
    parts = {
        "decode": lambda: decode_cost(clock),
        "calibration": lambda: calibration_cost(arguments.layers, arguments.sequences),
    }
    for name in [arguments.part] if arguments.part else parts:
        made_by = {"schema": "duotone.transform.cost/1", **stamp(clock.device)}
        write_new_json(arguments.out / f"cost-{name}.json", made_by | {name: parts[name]()})


if __name__ == "__main__":
    main()
