"""Recipes as data: how to quantize the weights and activations of a multimodal model.

`RECIPES` holds MQuant, the baselines of its Table 2 and the ablations of its Tables 7 to 9.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from duotone.quant.spec_base import Record, is_count, is_number, is_word, require
from duotone.weights.methods.rule import (
    HEAD,
    KEPT_BITS,
    PARTS,
    WEIGHT_METHODS,
    LinearRule,
    checked_parts,
)
from duotone.weights.modules.packed_weight import BITS
from duotone.weights.modules.quant_linear import ACTIVATIONS, Activation

ONLINE = ("none", "hadamard")
SPLITS = ("never", "eq8", "always")
# Fields that take a word, and those that are on or off.
WORDS = {"method": WEIGHT_METHODS, "activation": ACTIVATIONS, "online": ONLINE, "split": SPLITS}
SWITCHES = ("clip", "modality_scales", "visual_first", "rotation", "online_attention", "pad")


@dataclass(frozen=True)
class Recipe(Record):
    """One way to quantize a model.

    bits, group, method, clip: of weights; group None is one scale per output channel. clip searches
        the range of least error, of the weight ("rtn", "gptq") or of the output ("awq"). "awq"
        scales input channels before it rounds: `weights.methods.awq`.
    activation: "static" or "dynamic" int8, or "none" (16 bit). A static scale is of the largest
        magnitude seen.
    modality_scales: two static scales per linear of the language model (MSQ), else one. Rows pick
        theirs.
    visual_first: the language model runs with visual tokens first (AIFS,
        `duotone.hf.weights.reorder`), so that slices of rows have one scale each: equal integers.
    smooth: SmoothQuant's alpha, None for no smoothing.
    rotation: norms folded, LayerNorm -> RMSNorm, residual stream and values rotated offline.
    online: transform of the inputs of down_proj and fc2.
    online_attention: a Hadamard over all heads before o_proj, in place of the offline one per head.
    split: channel 0 after the online transform stays floating point (RMS). "eq8": if MQuant's
        criterion holds for some row of the weight. "always": as in the released code. Or "never".
    parts: of the model, "head" among them only where it is named; pad: a size that no Hadamard
        matrix covers may be zero-padded. seed: of the rotations.
    rules: other widths and activations for some linears; where several cover one, the later wins.
    Errors: ValueError for values or combinations that have no meaning.
    """

    bits: int = 4
    group: int | None = None
    method: Literal["rtn", "gptq", "awq"] = "gptq"
    clip: bool = False
    activation: Activation = "static"
    modality_scales: bool = False
    visual_first: bool = False
    smooth: float | None = None
    rotation: bool = False
    online: Literal["none", "hadamard"] = "none"
    online_attention: bool = False
    split: Literal["never", "eq8", "always"] = "never"
    parts: tuple[str, ...] = PARTS
    pad: bool = True
    seed: int = 0
    rules: tuple[LinearRule, ...] = ()

    def __post_init__(self) -> None:
        ok = is_count(self.bits) and self.bits in BITS
        require(ok, f"a recipe's bits must be one of {BITS}", self.bits, "Bits of a weight.")
        for name, words in WORDS.items():
            value = getattr(self, name)
            rule = f"a recipe's {name} must be one of {words}"
            require(is_word(value, words), rule, value, "Pick one of them.")
        for name in SWITCHES:
            value = getattr(self, name)
            require(isinstance(value, bool), f"a recipe's {name} must be a bool", value, "")
        object.__setattr__(self, "parts", checked_parts(self.parts, "a recipe's parts"))
        self._check_numbers()
        self._check_combinations()
        self._normalise_rules()

    def _normalise_rules(self) -> None:
        rule = "a recipe's rules must be a list of LinearRule"
        require(isinstance(self.rules, (tuple, list)), rule, self.rules, "() for none.")
        made = tuple(
            one if isinstance(one, LinearRule) else LinearRule.from_dict(one) for one in self.rules
        )
        object.__setattr__(self, "rules", made)
        for one in made:
            if one.bits != KEPT_BITS:
                self._changed(one.changes)

    def _check_numbers(self) -> None:
        ok = self.group is None or (is_count(self.group) and self.group >= 2)
        ok = ok and (self.group or 0) % 2 == 0
        rule = "a recipe's group must be an even number of channels"
        require(ok, rule, self.group, "None: one scale per output channel.")
        ok = self.smooth is None or (is_number(self.smooth) and 0 <= self.smooth <= 1)
        rule = "a recipe's smooth must be a number between 0 and 1"
        require(ok, rule, self.smooth, "None: no smoothing.")
        ok = is_count(self.seed)
        require(ok, "a recipe's seed must be an integer >= 0", self.seed, "Of the rotations.")

    def _check_combinations(self) -> None:
        wrong = {
            "modality_scales need static activations": self.modality_scales
            and self.activation != "static",
            "visual_first is a way to apply modality_scales": self.visual_first
            and not self.modality_scales,
            "split needs an online transform": self.split != "never" and self.online == "none",
            "split leaves a floating-point activation out of int8 ones": self.split != "never"
            and self.activation == "none",
            "smooth and rotation are rivals": self.smooth is not None and self.rotation,
            "awq finds scales of its own, for inputs that are neither smoothed nor rotated": (
                self.method == "awq"
                and (self.smooth is not None or self.rotation or self.has_online)
            ),
        }
        for rule, broken in wrong.items():
            if broken:
                raise ValueError(f"{rule}; got {self}")

    @property
    def has_online(self) -> bool:
        """True if some linear's input is transformed at run time by the recipe."""
        return self.online != "none" or self.online_attention

    def of(self, path: str, role: str, part: str) -> Recipe | None:
        """The recipe of one linear, without rules; None for one that stays in 16 bit."""
        changes: dict[str, Any] = {}
        for rule in self.rules:
            if rule.covers(path, role, part):
                # The later rule decides all of it: what one kept in 16 bit another may quantize.
                changes = {n: v for n, v in changes.items() if n != "bits" or v != KEPT_BITS}
                changes |= rule.changes
        return None if changes.get("bits") == KEPT_BITS else self._changed(changes)

    def _changed(self, changes: Mapping[str, Any]) -> Recipe:
        changes = {**changes, "rules": ()}
        activation = changes.get("activation", self.activation)
        if activation != "static":
            changes |= {"modality_scales": False, "visual_first": False}
        if activation == "none":
            changes["split"] = "never"
        return self.replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe fields."""
        rules = [rule.to_dict() for rule in self.rules]
        return asdict(self) | {"parts": list(self.parts), "rules": rules}


# A scale per token where static ones lose most on outliers: the inputs of down_proj.
DOWN_PER_TOKEN = LinearRule("mlp_output", ("language",), activation="dynamic")
# The same for o_proj, whose inputs come next by the error of static scales.
OUTPUTS_PER_TOKEN = LinearRule("*_output", ("language",), activation="dynamic")
# The vision tower of MQuant's Table 2.
VISION_W8 = LinearRule(parts=("vision",), bits=8, clip=False)
# A scale per token: the head sees one token of a sequence per step.
HEAD_W8A8 = LinearRule(HEAD, (HEAD,), bits=8, method="rtn", clip=False, activation="dynamic")
WITH_HEAD = (*PARTS, HEAD)


def _family(bits: int) -> dict[str, Recipe]:
    """The methods of Table 2 and the ablations of Tables 7 to 9 at one width of weights."""
    rtn = Recipe(bits=bits, method="rtn")
    static = Recipe(bits=bits, clip=bits == 4)
    msq = static.replace(modality_scales=True)
    rotated = msq.replace(rotation=True, online="hadamard")
    quarot = static.replace(rotation=True, online="hadamard")
    mquant = rotated.replace(split="eq8")
    smoothed = static.replace(smooth=0.5)
    dynamic = static.replace(activation="dynamic")
    outputs = mquant.replace(rules=(OUTPUTS_PER_TOKEN,))
    return {
        "mquant": mquant,
        "mquant-down-per-token": mquant.replace(rules=(DOWN_PER_TOKEN,)),
        "mquant-outputs-per-token": outputs,
        "mquant-heads-outputs-per-token": outputs.replace(online_attention=True),
        "rtn": rtn,
        "smoothquant": rtn.replace(smooth=0.5),
        "smoothquant-gptq": smoothed,
        "smoothquant-gptq-dynamic": smoothed.replace(activation="dynamic"),
        "awq": static.replace(method="awq"),
        "awq-dynamic": dynamic.replace(method="awq"),
        "quarot": quarot,
        "quarot-per-token": quarot.replace(activation="dynamic", online_attention=True),
        "static": static,
        "static-msq": msq,
        "static-msq-aifs": msq.replace(visual_first=True),
        "static-msq-rotation": rotated,
        "mquant-always-split": rotated.replace(split="always"),
        "dynamic": dynamic,
        "rtn-dynamic": rtn.replace(activation="dynamic"),
    }


W4A16 = Recipe(bits=4, group=128, clip=True, activation="none")
_FOUR_BITS = _family(4)
_MQUANT = _FOUR_BITS["mquant"]
_HEADS = _FOUR_BITS["mquant-heads-outputs-per-token"]

RECIPES: dict[str, Recipe] = {
    f"{name}-w{bits}a8": recipe for bits in (4, 8) for name, recipe in _family(bits).items()
} | {
    "mquant-vision8-w4a8": _MQUANT.replace(rules=(VISION_W8,)),
    "mquant-head8-w4a8": _MQUANT.replace(rules=(HEAD_W8A8,), parts=WITH_HEAD),
    "mquant-vision8-down-per-token-w4a8": _MQUANT.replace(rules=(VISION_W8, DOWN_PER_TOKEN)),
    "mquant-vision8-heads-outputs-per-token-w4a8": _HEADS.replace(
        rules=(VISION_W8, OUTPUTS_PER_TOKEN)
    ),
    "quarot-vision8-per-token-w4a8": _FOUR_BITS["quarot-per-token"].replace(rules=(VISION_W8,)),
    "mquant-w4a8-g128": _MQUANT.replace(group=128),
    "w4a16-g128": W4A16,
    "awq-w4a16-g128": W4A16.replace(method="awq"),
}


def get_recipe(name: str) -> Recipe:
    """The recipe of that name. Errors: ValueError that names the nearest ones."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=2, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"a recipe must be one of {sorted(RECIPES)}, got {name!r}{hint}")
