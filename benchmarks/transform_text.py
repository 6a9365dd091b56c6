"""Transform coding of a text model's stream: KL and perplexity by true bits.

    python benchmarks/transform_text.py --model STORIES --data IDS --out results/transform

STORIES and IDS as in `scheme_table.py`.

Bases from the last documents; of the first ones every token is predicted from its quantized past,
with windows of `--window` recent tokens for all schemes, and compared with what 16 bit predicts.
All schemes read a batch one after the other, so that their differences are paired.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_table import log
from scheme_rows import cut
from scheme_table import depth_of

import duotone
from duotone import CacheSpec
from duotone.calibrate import CalibrationBatch, Settings
from duotone.calibrate.run import learn, spec_with
from duotone.evaluate.forcing import kl_divergence
from duotone.evaluate.perplexity import perplexity_score, window_logits
from duotone.hf.facts import model_facts
from duotone.loading import Loaded, load
from duotone.report.provenance import stamp, write_new_json
from duotone.tasks import Passages, read_passages
from duotone.tasks.metrics import Score, confidence_interval, paired_difference

GROUPS, BITS = (32, 128), (1.0, 1.5, 2.0, 3.0)
PUBLISHED = (("kivi", 2), ("kivi", 4), ("kivi-sink", 2), ("innerq", 2), ("innerq", 1))
REFERENCE = "16-bit"


def batches_of(documents: Any, context: int, size: int) -> list[CalibrationBatch]:
    """First windows of documents, those of like length together: padding is on the left."""
    windows = sorted((document[0][:context] for document in documents), key=len)
    made = []
    for start in range(0, len(windows), size):
        rows = windows[start : start + size]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        made.append(CalibrationBatch({"input_ids": ids, "attention_mask": mask}, 1))
    return made


def calibrated(
    loaded: Loaded, batches: list[CalibrationBatch], folder: Path, window: int
) -> dict[str, CacheSpec]:
    """{label: spec} by group and bits; what samples say is asked once per group."""
    specs, facts = {}, model_facts(loaded.model)
    for group in GROUPS:
        settings = Settings(group=group, regularization=0.1)
        learned = learn(loaded, batches, settings)
        file = folder / f"{group}.safetensors"
        learned.bases.save(file)
        log("calibrated, groups of", group)
        for bits in BITS:
            own = replace(settings, bits=bits)
            spec = spec_with(facts, learned.widths(own), str(file), own)
            specs[f"klt {bits}, groups of {group}"] = cut(spec, window)
    return specs


@dataclass
class Reading:
    """One scheme's sums per document: nats of loss, nats of KL, tokens."""

    rows: np.ndarray
    seconds: float = 0.0

    def add(self, owners: Sequence[int], columns: Sequence[torch.Tensor]) -> None:
        """Sums of a batch's windows."""
        sums = torch.stack([column.double().sum(1) for column in columns], 1)
        np.add.at(self.rows, list(owners), sums.cpu().numpy())


def bytes_of(model: Any, passages: Passages, spec: CacheSpec) -> dict[str, float]:
    """True bits of a stream of as many tokens as the context has, its window as 16-bit numbers.

    One sequence alone: in a batch of unequal ones the shorter are padded.
    """
    words = [token for document in passages.documents for token in document[0]]
    read, _, cache = window_logits(model, [words[: passages.context]], spec)
    for _ in read:
        pass
    memory, facts, state = cache.memory(), cache.facts, cache.ledger.state
    per_token = 2 * facts.layers * facts.kv_heads * facts.head_dim
    packed, dense = (int(roll.lengths.sum()) * per_token for roll in (state.stream, state.dense))
    window = memory.dense_bytes * 2 / cache.layers[0].store.key.element_size()
    every = memory.total_bytes - memory.dense_bytes + window
    cache.detach()
    return {
        "packed_bits": 8 * (memory.codes_bytes + memory.params_bytes) / packed,
        "bits": 8 * every / (packed + dense),
        "code_bits": memory.nominal_bits,
    }


@torch.inference_mode()
def read_all(
    model: Any, passages: Passages, specs: dict[str, CacheSpec | None], n: int, size: int
) -> dict[str, Reading]:
    """Every scheme on the first `n` documents' windows, along 16 bit's."""
    owned = [(i, w) for i, document in enumerate(passages.documents[:n]) for w in document]
    owned.sort(key=lambda pair: len(pair[1]))
    readings = {label: Reading(np.zeros((n, 3))) for label in specs}
    for start in range(0, len(owned), size):
        owners, windows = zip(*owned[start : start + size], strict=True)
        reference = None
        for label, reading in readings.items():
            began = time.monotonic()
            read, mask, cache = window_logits(model, windows, specs[label])
            logits = torch.cat([logits for _, logits in read], 1)
            reference = logits if reference is None else reference
            reading.add(owners, _columns(windows, logits, reference, mask))
            if specs[label] is not None:
                cache.detach()
            reading.seconds += time.monotonic() - began
        log(f"{start + len(windows)}/{len(owned)} windows")
    return readings


def _columns(
    windows: Any, logits: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Loss, KL and 1 per predicted token [B, T - 1]."""
    targets = torch.nn.utils.rnn.pad_sequence([torch.tensor(w) for w in windows], batch_first=True)
    aimed = targets[:, 1:].to(logits.device)
    losses = torch.nn.functional.cross_entropy(logits.mT, aimed, reduction="none")
    return losses * mask, kl_divergence(reference, logits) * mask, mask


def numbers(reading: Reading, reference: Reading) -> dict[str, Any]:
    """JSON-safe scores of one scheme."""
    losses, theirs = (perplexity_score(r.rows[:, [0, 2]]) for r in (reading, reference))
    made = {"perplexity": confidence_interval(losses).to_dict(), "seconds": reading.seconds}
    if reading is reference:
        return made
    return made | {
        "difference": paired_difference(losses, theirs).to_dict(),
        "kl": confidence_interval(Score(reading.rows[:, [1, 2]])).to_dict(),
    }


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--n", type=int, default=100, help="documents to measure on")
    parser.add_argument("--calibration", type=int, default=48, help="documents to calibrate on")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Tensors of small models: on a busy machine threads that wait for each other cost ten times.
    torch.set_num_threads(1)
    loaded = load(arguments.model, None, torch.float32, with_processor=False)
    passages: Passages = read_passages(arguments.data, arguments.context)
    if arguments.n + arguments.calibration > len(passages.documents):
        raise SystemExit(f"the data have {len(passages.documents)} documents only")
    last = passages.documents[-arguments.calibration :]
    given = batches_of(last, arguments.context, arguments.batch_size)
    # The state of the code that runs, whatever is committed meanwhile.
    made_by, n = stamp(loaded.model.device), arguments.n
    specs: dict[str, CacheSpec | None] = {REFERENCE: None}
    with tempfile.TemporaryDirectory() as folder:
        specs |= calibrated(loaded, given, Path(folder), arguments.window)
        for name, bits in PUBLISHED:
            specs[f"{name} @{bits}"] = cut(duotone.scheme(name, bits=bits), arguments.window)
        readings = read_all(loaded.model, passages, specs, n, arguments.batch_size)
        schemes = {label: numbers(r, readings[REFERENCE]) for label, r in readings.items()}
        for label, spec in specs.items():
            if spec is not None:
                with torch.inference_mode():
                    schemes[label] |= bytes_of(loaded.model, passages, spec)
                schemes[label]["spec"] = json.loads(spec.to_json())
    facts = model_facts(loaded.model)
    data = {
        "schema": "duotone.transform.text/1",
        **made_by,
        "model": Path(arguments.model).name,
        "layers": depth_of(loaded.model),
        "head_dim": facts.head_dim,
        "dtype": "float32",
        "documents": n,
        "calibration_documents": arguments.calibration,
        "context": arguments.context,
        "window": arguments.window,
        "schemes": schemes,
    }
    write_new_json(arguments.out / f"{data['model']}.json", data)
    log("wrote", data["model"])


if __name__ == "__main__":
    main()
