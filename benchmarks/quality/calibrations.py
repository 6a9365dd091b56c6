"""`duotone calibrate` as rows of the zoo: 1 bit in bases of a model's own, from batches of its own.

A sample is a row of `training.zoo` up to its last question, which the model answers itself. Rows
are the calibrated specs as they are: no preset takes their place, as one may in the command.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone import CacheSpec
from duotone.calibrate import CalibrationBatch, Settings, calibrate
from duotone.loading import Loaded
from training.zoo.batches import Batch
from training.zoo.members import model_inputs
from training.zoo.train import HELD_OUT
from training.zoo.vocabulary import ID, PAD

BY_TOKEN = ("input_ids", "token_type_ids", "mm_token_type_ids")
CALIBRATION = 2 * HELD_OUT  # seed of batches that are neither trained on nor held out
TOGETHER = 4  # sequences of a batch, as in the command
ANSWER_TOKENS = 8
SETTINGS = {
    "calibrated@1": Settings(),
    "calibrated, whole@1": Settings(foreground=None),
}


def prompts(model: Any, batch: Batch) -> CalibrationBatch:
    """Rows up to the question of their last turn, padded on the left.

    Positions are left to `generate`, which counts them from the first token that is not padding.
    """
    asked = [int((row == ID["<assistant>"]).nonzero().max()) + 1 for row in batch.ids]
    real = torch.stack([torch.arange(batch.ids.shape[1]) < end for end in asked])
    given = model_inputs(model, batch) | {"attention_mask": real.long().to(batch.ids.device)}
    given.pop("position_ids", None)
    for name in {*BY_TOKEN, "attention_mask"} & given.keys():
        given[name] = _left_padded(given[name], asked, PAD if name == "input_ids" else 0)
    return CalibrationBatch(given, ANSWER_TOKENS)


def _left_padded(x: Tensor, ends: Sequence[int], value: int) -> Tensor:
    longest, rows = max(ends), zip(x, ends, strict=True)
    return torch.stack([F.pad(row[:end], (longest - end, 0), value=value) for row, end in rows])


def calibrations(model: Any, batch: Batch, folder: Path) -> dict[str, CacheSpec | str]:
    """{label: spec, or why there is none}. folder: gets the bases that the specs name."""
    rows = range(0, len(batch.ids), TOGETHER)
    samples = [prompts(model, batch.part(start, TOGETHER)) for start in rows]
    loaded, found = Loaded(model.config.model_type, model, None), {}
    for number, (name, settings) in enumerate(SETTINGS.items()):
        file = folder / f"calibrated-{number}.safetensors"
        try:
            bases, spec, _ = calibrate(loaded, samples, settings, file=str(file))
        except (RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        bases.save(file)
        found[name] = spec
    return found
