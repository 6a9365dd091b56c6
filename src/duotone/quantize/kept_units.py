"""The units of a quantization that is not finished, in a folder beside its output.

One file per unit, written once: a run that is interrupted loses the unit it was at and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from duotone.hf.model.fingerprint import fingerprint
from duotone.hf.model.identity import weights_digest
from duotone.tools.resume import Unfinished
from duotone.weights.equivalences.module_map import at, put, set_data
from duotone.weights.methods.recipe import Recipe
from duotone.weights.modules.checkpoint_records import made_of, record_of
from duotone.weights.modules.modality import Modality

from .calibration import CalibrationSet

# Of the files and of what they mean: a change of the arithmetic needs another one.
FORMAT = 3


def identity(model: Any, recipe: Recipe, calibration: CalibrationSet) -> dict[str, Any]:
    """All that the units depend on, JSON-safe; of the model before anything is done to it."""
    return {
        "format": FORMAT,
        "model": fingerprint(model),
        "weights": weights_digest(model),
        "recipe": recipe.to_dict(),
        "batches": calibration.digest(),
    }


def unfinished(folder: Path | None, given: Mapping[str, Any]) -> Unfinished:
    """Open the folder that an earlier run left.

    Errors: ValueError for a folder of another run or origin, which is never removed.
    """
    kept = Unfinished(folder, given, "quantization", "unit", "units")
    kept.check()
    return kept


def keep_unit(
    kept: Unfinished,
    number: int,
    made: Mapping[str, nn.Module],
    report: list[Any],
    others: Mapping[str, torch.Tensor],
) -> None:
    """Write a finished unit: {path in the model: module} and its lines of the report.

    others: {name in the model: parameter} that changed and stay what they are.
    """
    records = {path: record_of(module) for path, module in made.items()}
    tensors = {
        f"{path}.{name}": tensor
        for path, module in made.items()
        for name, tensor in module.state_dict().items()
    }
    header = {"records": records, "report": report, "others": list(others)}
    kept.keep(number, header, tensors | dict(others))


def restore_unit(
    kept: Unfinished, number: int, model: nn.Module, modality: Modality, impl: str = "auto"
) -> list[Any] | None:
    """Put a finished unit's modules into the model; its report, or None if it is not there.

    Errors: ValueError naming a file that is damaged, whose modules may be in place in part.
    """
    if not kept.has(number):
        return None
    header, tensors = kept.read(number)
    with kept.reading(number):
        for path, record in header["records"].items():
            module = _filled(at(model, path), record, path, tensors, modality)
            module.impl = impl
            put(model, path, module)
        for name in header["others"]:
            set_data(at(model, name), tensors[name])
    return header["report"]


def _filled(
    before: nn.Module,
    record: Mapping[str, Any],
    path: str,
    tensors: Mapping[str, torch.Tensor],
    modality: Modality,
) -> nn.Module:
    parameter = next(before.parameters())
    module = made_of(record, parameter.dtype, modality)
    own = {n.removeprefix(f"{path}."): t for n, t in tensors.items() if n.startswith(f"{path}.")}
    module.load_state_dict(own, strict=True, assign=True)
    return module.to(parameter.device)
