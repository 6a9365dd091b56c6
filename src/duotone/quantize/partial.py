"""The units of a quantization that is not finished, in a folder beside its output.

One file per unit, written once: a run that is interrupted loses the unit it was at and no more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from duotone.hf.fingerprint import fingerprint, weights_digest
from duotone.quant import tensor_file
from duotone.resume import check_identity, not_partial, noted
from duotone.weights.equivalences.module_map import at, put, set_data
from duotone.weights.methods.recipe import Recipe
from duotone.weights.modules.checkpoint_records import made_of, record_of
from duotone.weights.modules.modality import Modality

from .calibration import CalibrationSet

# Of the files and of what they mean: a change of the arithmetic needs another one.
FORMAT = 3
KEY = "unit"


def identity(model: Any, recipe: Recipe, calibration: CalibrationSet) -> dict[str, Any]:
    """All that the units depend on, JSON-safe; of the model before anything is done to it."""
    return {
        "format": FORMAT,
        "model": fingerprint(model),
        "weights": weights_digest(model),
        "recipe": recipe.to_dict(),
        "batches": calibration.digest(),
    }


@dataclass(frozen=True)
class Partial:
    """Finished units of a run with this identity; a folder of None keeps nothing."""

    folder: Path | None

    @classmethod
    def open(cls, folder: Path | None, given: Mapping[str, Any], resume: bool = True) -> Partial:
        """Open the folder that an earlier run left, or begin a new one.

        Errors: ValueError for a folder of another run or origin, which is never removed.
        """
        if folder is None:
            return cls(None)
        if folder.exists() and not resume:
            _read(folder)
            shutil.rmtree(folder)
        if folder.exists():
            _check(folder, given)
        else:
            folder.mkdir(parents=True)
            (folder / "identity.json").write_text(json.dumps(given), encoding="utf-8")
        return cls(folder)

    def keep(
        self,
        number: int,
        made: Mapping[str, nn.Module],
        report: list[Any],
        others: Mapping[str, torch.Tensor],
    ) -> None:
        """Write a finished unit: {path in the model: module} and its lines of the report.

        others: {name in the model: parameter} that changed and stay what they are.
        """
        if self.folder is None:
            return
        records = {path: record_of(module) for path, module in made.items()}
        tensors = {
            f"{path}.{name}": tensor.cpu().contiguous()
            for path, module in made.items()
            for name, tensor in module.state_dict().items()
        }
        tensors |= {name: tensor.cpu().contiguous() for name, tensor in others.items()}
        header = {"records": records, "report": report, "others": list(others)}
        tensor_file.write(self._file(number), tensors, header, KEY)

    def restore(
        self, number: int, model: nn.Module, modality: Modality, impl: str = "auto"
    ) -> list[Any] | None:
        """Put a finished unit's modules into the model; its report, or None if it is not there.

        Errors: ValueError naming a file that is damaged, whose modules may be in place in part.
        """
        if self.folder is None or not self._file(number).exists():
            return None
        file = self._file(number)
        with tensor_file.damage_named(f"{file} cannot be gone on with, remove it to do it again"):
            header, tensors = tensor_file.read(file, KEY, "a unit of a quantization")
            for path, record in header["records"].items():
                module = _filled(at(model, path), record, path, tensors, modality)
                module.impl = impl
                put(model, path, module)
            for name in header["others"]:
                set_data(at(model, name), tensors[name])
        return header["report"]

    def remove(self) -> None:
        """The quantization is finished."""
        if self.folder is not None:
            shutil.rmtree(self.folder)

    def noted(self, total: int) -> AbstractContextManager[None]:
        """Work on `total` units whose interruption carries a note of finished ones."""
        return noted(lambda: None if self.folder is None else self._kept(total))

    def _kept(self, total: int) -> str:
        count = len(list(self.folder.glob("unit-*.safetensors")))
        return f"{count} of {total} units are kept in {self.folder}; the same command goes on there"

    def _file(self, number: int) -> Path:
        return self.folder / f"unit-{number:04d}.safetensors"


def _read(folder: Path) -> dict[str, Any]:
    """The identity of a partial folder. Errors: ValueError for any other folder."""
    try:
        found = json.loads((folder / "identity.json").read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("identity.json is no JSON object")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise not_partial("quantization", folder, error) from error


def _check(folder: Path, given: Mapping[str, Any]) -> None:
    again = "--no-resume to begin again"
    check_identity("quantization", folder, _read(folder), dict(given), again)


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
