"""Bytes of whole conversations with pictures of real sizes, beside KIVI's code, without a model.

    PYTHONPATH=src:. python -m benchmarks.quality.conversation_bytes --out results/zoo/conversation

Means over a round of KIVI's window, that is 128 lengths. Bytes of ours are those of `duotone plan`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import duotone
from benchmarks.quality.conversation import KIVI, WINDOW, default, published_bytes
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.calibrate.settings import SINK, Settings
from duotone.calibrate.text import text_settings
from duotone.planning.memory import plan
from duotone.planning.shapes import SHAPE_8B
from duotone.quant.our_schemes import with_pictures
from duotone.report.provenance import stamp, write_new_json

STEP = 8  # between lengths that are planned
# Visual tokens, pictures, tokens of text: LLaVA's 576 a picture, LLaVA-OneVision's 3,328 and more.
TALKS = (
    (576, 1, 64),
    (576, 1, 256),
    (576, 1, 1024),
    (1152, 2, 256),
    (3328, 1, 64),
    (3328, 1, 256),
    (3328, 1, 1024),
    (13312, 4, 256),
    (13312, 4, 1024),
    (13312, 4, 4096),
)


# Classes of channels by code bits: a calibration chooses them by layer, of this mean.
CLASSES = {
    "calibrated@2": ((4, 1 / 8), (2, 3 / 4)),
    "calibrated@1.5": ((4, 1 / 8), (2, 3 / 8), (1, 1 / 4)),
}


def calibrated() -> dict[str, CacheSpec]:
    """{label: spec}: specs as wide as those of `duotone calibrate --text`.

    Calibrated pictures are as large as those of `duotone@1`. Rotations cost no bytes.
    """
    found = {}
    for name, classes in CLASSES.items():
        settings = text_settings(name, Settings())
        tensor = TensorSpec(classes=classes, group=settings.group, param_dtype="float8")
        words = CacheSpec(
            visual="text", text=KVSpec(tensor, tensor), sink=SINK, recent=settings.recent
        )
        found[f"{name}, pictures too"] = with_pictures(words, duotone.scheme("duotone", bits=1))
    return found


def mean_bytes(spec: CacheSpec, visual: int, pictures: int, text: int) -> float:
    """Bytes of one sequence, as a mean over `text` and up to WINDOW more tokens of text."""
    lengths = range(text, text + WINDOW, STEP)
    plans = (
        plan(SHAPE_8B, spec, visual_tokens=visual, images=pictures, text_tokens=n) for n in lengths
    )
    return sum(each.bytes_per_sequence for each in plans) / len(lengths)


def kivi_bytes(tokens: int) -> float:
    """Bytes that KIVI's code takes at 2 bits, as a mean over `tokens` and up to WINDOW more."""
    numbers = sum(shape.kv_heads * shape.head_dim for shape in SHAPE_8B.shapes)
    lengths = range(tokens, tokens + WINDOW, STEP)
    return sum(published_bytes(2, n, numbers) for n in lengths) / len(lengths)


def compared(visual: int, pictures: int, text: int) -> dict[str, Any]:
    """Bytes of one conversation by spec."""
    specs = {name: spec for name, spec in default().items() if name != KIVI} | calibrated()
    return {
        "visual_tokens": visual,
        "pictures": pictures,
        "text_tokens": text,
        "kivi_bytes": kivi_bytes(visual + text),
        "bytes": {name: mean_bytes(x, visual, pictures, text) for name, x in specs.items()},
    }


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    layers, each = len(SHAPE_8B.shapes), SHAPE_8B.shapes[0]
    shape = f"{layers} layers, {each.kv_heads} kv heads of {each.head_dim} channels"
    header = {"schema": "duotone.conversation-bytes/1", **stamp(torch.device("cpu"))}
    talks = [compared(*talk) for talk in TALKS]
    write_new_json(args.out / "bytes.json", {**header, "shape": shape, "talks": talks})


if __name__ == "__main__":
    main()
