"""Transform coding of a text model's stream: perplexity by true bits.

    python benchmarks/transform_text.py --model ../shared/data/stories260k \
        --data ../shared/data/stories260k/tinystories_ids.json --out results/transform

Bases from the last documents, perplexity of the first ones, every token from its quantized past.
Windows of `--window` recent tokens for all schemes.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from quality_table import log
from scheme_rows import cut
from scheme_table import depth_of, text_table_rows

import duotone
from duotone import CacheSpec
from duotone.calibrate import CalibrationBatch, Settings, calibrate
from duotone.evaluate import evaluate_perplexity
from duotone.loading import Loaded, load
from duotone.provenance import stamp, write_new_json
from duotone.tasks import Passages, read_passages

GROUPS, BITS = (32, 128), (1.0, 1.5, 2.0, 3.0)
PUBLISHED = ("kivi", "kivi-sink", "innerq")


def batches_of(documents: Any, context: int) -> list[CalibrationBatch]:
    """One document each: its first window."""
    made = []
    for document in documents:
        ids = torch.tensor([document[0][:context]])
        made.append(CalibrationBatch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 1))
    return made


def calibrated(
    loaded: Loaded, batches: list[CalibrationBatch], folder: Path, window: int
) -> dict[str, CacheSpec]:
    """{label: spec} by group and bits."""
    specs = {}
    for group in GROUPS:
        for bits in BITS:
            settings = Settings(bits=bits, group=group, regularization=0.1)
            file = folder / f"{group}-{bits}.safetensors"
            bases, spec, _ = calibrate(loaded, batches, settings, file=str(file))
            bases.save(file)
            specs[f"klt {bits}, groups of {group}"] = cut(spec, window)
    return specs


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--n", type=int, default=100, help="documents to measure on")
    parser.add_argument("--calibration", type=int, default=48, help="documents to calibrate on")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    loaded = load(arguments.model, None, torch.float32, with_processor=False)
    passages: Passages = read_passages(arguments.data, arguments.context)
    if arguments.n + arguments.calibration > len(passages.documents):
        raise SystemExit(f"the data have {len(passages.documents)} documents only")
    given = batches_of(passages.documents[-arguments.calibration :], arguments.context)
    # The state of the code that runs, whatever is committed meanwhile.
    made_by = stamp(loaded.model.device)
    with tempfile.TemporaryDirectory() as folder:
        specs = calibrated(loaded, given, Path(folder), arguments.window)
        names = {f"{name} @{b}": duotone.scheme(name, bits=b) for name in PUBLISHED for b in (1, 2)}
        specs |= {label: cut(spec, arguments.window) for label, spec in names.items()}
        evaluation = evaluate_perplexity(
            loaded.model, passages, specs, arguments.n, batch_size=arguments.batch_size
        )
    rows = text_table_rows(evaluation)
    data = {
        "schema": "duotone.transform.text/1",
        **made_by,
        "model": Path(arguments.model).name,
        "layers": depth_of(loaded.model),
        "dtype": "float32",
        "documents": arguments.n,
        "calibration_documents": arguments.calibration,
        "context": arguments.context,
        "window": arguments.window,
        "schemes": rows,
    }
    write_new_json(arguments.out / f"{data['model']}.json", data)
    log("wrote", data["model"])


if __name__ == "__main__":
    main()
