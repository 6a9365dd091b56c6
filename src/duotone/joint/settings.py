"""Settings of a search over pairs of weights and caches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from duotone.planning.card import AS_IT_IS, RESERVE_SHARE
from duotone.tune import TuneSettings
from duotone.weights.methods.recipe import get_recipe

# From many bytes to few; the weights of a pair are one of these where none are named.
RECIPES = (AS_IT_IS, "mquant-w8a8", "mquant-w4a8")


@dataclass(frozen=True)
class JointSettings:
    """Settings that decide which pair is found, in addition to model, tasks and run time.

    memory_bytes: of the card. sequences, tokens: to hold at once, and the length of each with its
    answer. reserve_bytes: memory for all else; None: a tenth. weights: names of recipes; "none"
    leaves the model as it is. Other fields: as of `TuneSettings`.
    Errors: ValueError for sizes that are none, and for unknown recipes.
    """

    memory_bytes: int
    sequences: int
    tokens: int
    reserve_bytes: int | None = None
    weights: tuple[str, ...] = RECIPES
    samples: int = 8
    heldout: int = 16
    batch_size: int = 8
    seed: int = 0
    portable: bool = False
    ceiling: float = 8.0
    sampler: str = "nsga2"

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "sequences", "tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1; got {value!r}")
        if not self.weights or len(set(self.weights)) < len(self.weights):
            raise ValueError(f"weights must be different recipes, at least one; got {self.weights}")
        for name in self.weights:
            if name != AS_IT_IS:
                get_recipe(name)
        self.tune_settings(1.0)

    @property
    def reserve(self) -> int:
        """Bytes that neither weights nor caches get."""
        given = self.reserve_bytes
        return int(RESERVE_SHARE * self.memory_bytes) if given is None else given

    def tune_settings(self, bits: float) -> TuneSettings:
        """Settings of the search beside one recipe, whose caches may take so many true bits."""
        return TuneSettings(
            budget_bits=bits,
            bits_of="cache",
            samples=self.samples,
            heldout=self.heldout,
            batch_size=self.batch_size,
            seed=self.seed,
            portable=self.portable,
            ceiling=self.ceiling,
            sampler=self.sampler,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe fields."""
        return asdict(self) | {"weights": list(self.weights)}
