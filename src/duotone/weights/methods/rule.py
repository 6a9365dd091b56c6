"""Rules of a recipe: other widths and activations for some linears, by name, role and part.

A role says what a linear does in a block, whatever its family calls it: o_proj, out_proj, dense and
proj are all the "attention_output".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from duotone.quant.spec_base import Record, is_count, is_word, require
from duotone.weights.modules.packed_weight import BITS
from duotone.weights.modules.quant_linear import ACTIVATIONS

PARTS = ("vision", "projector", "language")
HEAD = "head"
ALL_PARTS = (*PARTS, HEAD)
ROLES = ("attention_input", "attention_output", "mlp_input", "mlp_output", "projector", HEAD)
# Of a rule: the linear stays in the model's own type.
KEPT_BITS = 16
WEIGHT_METHODS = ("rtn", "gptq", "awq")
CHANGES = ("bits", "method", "clip", "activation")
_SYNTAX = "[PART/]LINEARS:FIELD=VALUE,..., e.g. language/mlp_output:activation=dynamic"


@dataclass(frozen=True)
class LinearRule(Record):
    """Other fields for the linears of `parts` that `linears` matches; None keeps the recipe's.

    linears: a pattern with * and ? for the path in the model ("*.down_proj"), or for the role
        ("mlp_output"; one of ROLES).
    bits: 4, 8, or 16 for a linear that stays as it is. method, clip, activation: as in a recipe.
        Activations other than static ones have no scales per modality.
    Errors: ValueError for values that have no meaning, or a rule that changes nothing.
    """

    linears: str = "*"
    parts: tuple[str, ...] = ALL_PARTS
    bits: int | None = None
    method: str | None = None
    clip: bool | None = None
    activation: str | None = None

    def __post_init__(self) -> None:
        ok = isinstance(self.linears, str) and bool(self.linears)
        require(ok, "a rule's linears must be a pattern", self.linears, f"E.g. one of {ROLES}.")
        object.__setattr__(self, "parts", checked_parts(self.parts, "a rule's parts"))
        widths = (*BITS, KEPT_BITS)
        ok = self.bits is None or (is_count(self.bits) and self.bits in widths)
        require(ok, f"a rule's bits must be one of {widths}", self.bits, "None: the recipe's.")
        for name, words in (("method", WEIGHT_METHODS[:2]), ("activation", ACTIVATIONS)):
            value = getattr(self, name)
            ok = value is None or is_word(value, words)
            require(ok, f"a rule's {name} must be one of {words}", value, "None: the recipe's.")
        ok = self.clip is None or isinstance(self.clip, bool)
        require(ok, "a rule's clip must be a bool", self.clip, "None: the recipe's.")
        require(bool(self.changes), f"a rule must change one of {CHANGES}", self, "")
        alone = self.bits != KEPT_BITS or len(self.changes) == 1
        require(alone, "a linear of 16 bits has nothing else to choose", self.changes, "")

    @property
    def changes(self) -> dict[str, Any]:
        """{field of a recipe: value} of what this rule changes."""
        return {n: getattr(self, n) for n in CHANGES if getattr(self, n) is not None}

    def covers(self, path: str, role: str, part: str) -> bool:
        """True where this rule covers the linear at `path`."""
        named = fnmatchcase(path, self.linears) or fnmatchcase(role, self.linears)
        return named and part in self.parts

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe fields."""
        return asdict(self) | {"parts": list(self.parts)}

    @classmethod
    def from_text(cls, text: str) -> LinearRule:
        """The rule of `duotone quantize --rule`. Errors: ValueError that shows the syntax."""
        where, colon, what = text.partition(":")
        part, slash, linears = where.rpartition("/")
        pairs = [pair.partition("=") for pair in what.split(",")]
        ok = bool(colon and linears) and bool(part) == bool(slash)
        ok = ok and all(value and name in CHANGES for name, _, value in pairs)
        require(ok, f"a rule is {_SYNTAX}", text, f"Fields: {CHANGES}.")
        given = {name: _value(name, value) for name, _, value in pairs}
        return cls(linears, (part,) if part else ALL_PARTS, **given)


def checked_parts(parts: Any, what: str) -> tuple[str, ...]:
    """Parts of a model as a tuple. Errors: ValueError for others than ALL_PARTS, or none."""
    ok = isinstance(parts, (tuple, list)) and len(parts) > 0
    ok = ok and all(is_word(part, ALL_PARTS) for part in parts)
    require(ok, f"{what} must be some of {ALL_PARTS}", parts, "A list of them.")
    return tuple(parts)


def _value(name: str, text: str) -> Any:
    """A word of the command line in the field's type; what does not fit stays a word."""
    if name == "bits" and text.isdigit():
        return int(text)
    return {"true": True, "false": False}.get(text, text) if name == "clip" else text
