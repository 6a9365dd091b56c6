"""`duotone calibrate` as rows of the zoo: 1 bit in bases of a model's own, from batches of its own.

A sample is a row of `training.zoo` up to its last question, which the model answers itself. Rows
are the calibrated specs as they are: no preset takes their place, as one may in the command.

*Made up* are samples that the command has without any data: pictures of its task `made-up`, which
no model of the zoo was trained on, and random tokens in place of questions and answers.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor

from duotone import CacheSpec
from duotone.calibrate import CalibrationBatch, Settings, calibrate
from duotone.calibrate.data import MADE_UP_SAMPLES
from duotone.loading import Loaded
from duotone.tasks import MADE_UP as MADE_UP_TASK
from training.zoo.batches import Batch
from training.zoo.members import model_inputs
from training.zoo.train import HELD_OUT
from training.zoo.vocabulary import ID, IMAGE, PAD, TOKENS, VIDEO

BY_TOKEN = ("input_ids", "token_type_ids", "mm_token_type_ids")
CALIBRATION = 2 * HELD_OUT  # seed of batches that are neither trained on nor held out
TOGETHER = 4  # sequences of a batch, as in the command
ANSWER_TOKENS = 8
SETTINGS = {
    "calibrated@1": Settings(bits=1.0),
    "calibrated, whole@1": Settings(bits=1.0, foreground=None),
    "calibrated, equal bits@1": Settings(),
}
MADE_UP = {"calibrated, made up@1": Settings()}
FRAMES = (PAD, IMAGE, VIDEO, *(ID[x] for x in ("<vision>", "</vision>", "<user>", "<assistant>")))
SEED = 0


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


def made_up(batch: Batch, rows: int = MADE_UP_SAMPLES) -> Batch:
    """Return rows without data: other pictures, and random tokens but for frames of turns."""
    batch = _repeated(batch, rows)
    side = batch.pixels.shape[-1]
    examples = (
        MADE_UP_TASK.example(i, "calibration") for i in range(batch.pixels[:, :, 0, 0, 0].numel())
    )
    drawn = [to_tensor(each.images[0].resize((side, side))) for each in examples]
    pixels = torch.stack(drawn).view_as(batch.pixels).to(batch.pixels)
    draw = torch.Generator().manual_seed(SEED)
    words = torch.randint(max(FRAMES) + 1, len(TOKENS), batch.ids.shape, generator=draw)
    framed = torch.isin(batch.ids, torch.tensor(FRAMES, device=batch.ids.device))
    ids = torch.where(framed, batch.ids, words.to(batch.ids.device))
    return replace(batch, ids=ids, pixels=pixels)


def _repeated(batch: Batch, rows: int) -> Batch:
    """Return so many rows of a batch, the first ones again where it has fewer."""
    order = torch.arange(rows, device=batch.ids.device) % len(batch.ids)
    cells = None if batch.cells is None else batch.cells[order.to(batch.cells.device)]
    ids, kinds, pixels = batch.ids[order], batch.kinds[order], batch.pixels[order]
    return Batch(replace(batch.shape, rows=rows), ids, kinds, pixels, cells)


def to_tensor(picture: Image) -> Tensor:
    """Return [3, S, S] from -1 to 1, as the zoo renders pictures."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1


def calibrations(model: Any, batch: Batch, folder: Path) -> dict[str, CacheSpec | str]:
    """{label: spec, or why there is none}. folder: gets the bases that the specs name."""
    return _calibrated(model, batch, SETTINGS, folder / "own")


def without_data(
    model: Any, batch: Batch, folder: Path, rows: int = MADE_UP_SAMPLES
) -> dict[str, CacheSpec | str]:
    """`calibrations` from made-up samples, with pictures and turns where the batch has them."""
    return _calibrated(model, made_up(batch, rows), MADE_UP, folder / "made-up")


def _calibrated(
    model: Any, batch: Batch, rows: dict[str, Settings], stem: Path
) -> dict[str, CacheSpec | str]:
    starts = range(0, len(batch.ids), TOGETHER)
    samples = [prompts(model, batch.part(start, TOGETHER)) for start in starts]
    loaded, found = Loaded(model.config.model_type, model, None), {}
    for number, (name, settings) in enumerate(rows.items()):
        file = stem.with_name(f"{stem.name}-{number}.safetensors")
        try:
            bases, spec, _ = calibrate(loaded, samples, settings, file=str(file))
        except (RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        bases.save(file)
        found[name] = spec
    return found
