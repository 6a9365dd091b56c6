"""Settings of a search, and the folder that stores the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from duotone.report.provenance import write_new_json
from duotone.tools.resume import differences

from .kept import json_object, reading
from .search import SAMPLERS

SETTINGS = "settings.json"


@dataclass(frozen=True)
class TuneSettings:
    """Settings that decide a search's result, in addition to model, tasks and run time.

    budget_bits, budget_bytes: one of them; true bits per number of K and V, or bytes per sequence
        (mean over the samples). States and windows that stay the model's own are in neither.
    bits_of: scope of the budget: "visual", all bytes that hold the prompts' visual tokens, or
        "cache", all bytes. None: visual where all prompts have pictures.
    samples, heldout: per task, to search on and to report on. portable: no choice that names a
        layer, so that the spec fits models of any depth. ceiling: times the budget, where trials
        end. seed: of the sampler.
    """

    budget_bits: float | None = None
    budget_bytes: int | None = None
    bits_of: Literal["visual", "cache"] | None = None
    samples: int = 8
    heldout: int = 16
    batch_size: int = 8
    seed: int = 0
    portable: bool = False
    ceiling: float = 8.0
    sampler: str = "nsga2"

    def __post_init__(self) -> None:
        given = [b for b in (self.budget_bits, self.budget_bytes) if b is not None]
        if len(given) != 1 or given[0] <= 0:
            raise ValueError(
                "a search needs one budget above 0, in true bits per number or in bytes per "
                f"sequence; got bits {self.budget_bits} and bytes {self.budget_bytes}; "
                "e.g. --budget-bits 1.3"
            )
        if self.bits_of not in (None, "visual", "cache"):
            raise ValueError(f"bits_of must be 'visual' or 'cache', got {self.bits_of!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {self.batch_size}")
        if self.ceiling < 1:
            raise ValueError(f"ceiling must be at least 1 times the budget, got {self.ceiling}")
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler must be one of {SAMPLERS}, got {self.sampler!r}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe fields."""
        return asdict(self)


def check_resumable(out: Path, settings: Mapping[str, Any]) -> bool:
    """True if `out` holds a search with exactly these settings; False if it is new.

    Errors: ValueError for another search's folder, or one with other files.
    """
    kept = out / SETTINGS
    if not kept.exists():
        if out.exists() and any(out.iterdir()):
            raise ValueError(
                f"--out must be a new folder or a search's, got {str(out)!r} with other files in "
                "it; name another"
            )
        return False
    with reading(kept):
        old = json_object(kept)
    new = json.loads(json.dumps(settings))
    if old != new:
        raise ValueError(
            f"a search goes on with its first settings; in {str(out)!r} they differ in "
            f"{differences(old, new)}. Name another --out, or give the old ones"
        )
    return True


def remember(out: Path, settings: Mapping[str, Any]) -> None:
    """Make the folder and note the settings."""
    write_new_json(out / SETTINGS, settings)
