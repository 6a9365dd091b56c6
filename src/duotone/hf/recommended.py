"""The recommended spec of a model, by rules: the first whose checks the model passes.

The rules are data and know neither a model's weights nor its answers. What few bits cost a model of
its own is measured by `duotone evaluate`.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from duotone.defaults import CONVERSATIONS, TEXT
from duotone.hf.model.cache_bytes import cache_bytes
from duotone.hf.model.facts import ModelFacts, with_visual
from duotone.hf.model.fitting import checked_facts
from duotone.hf.model.spec_checks import check_spec
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.schemes import named

# Fields of a config that say how many tokens a picture has, where they are fixed.
PICTURE_FIELDS = (
    *("image_seq_length", "mm_tokens_per_image", "num_image_tokens"),
    "vision_soft_tokens_per_image",
)
# Tokens of the sequence that bytes are of; shares of visual tokens and of text in its prompt.
TOKENS, VISUAL_SHARE, TEXT_SHARE = 4096, 13 / 16, 1 / 32
# Groups along channels are no shorter; a shorter one would have the whole head instead.
LEAST_GROUP = 16


@dataclass(frozen=True)
class Rule:
    """A scheme, the models that it is for, and the reason.

    of_pictures: for models whose tokens may be visual; otherwise for all.
    """

    scheme: str
    of_pictures: bool
    why: str


# What a calibration has over the spec that is recommended.
SMALLER = "Pictures in 1 bit, text in 2.3, no data"
_LOCK = threading.Lock()
# Summaries that were printed.
_SAID: set[str] = set()
# By preference.
RULES = (
    Rule(
        CONVERSATIONS,
        True,
        "pictures fill most of a prompt and bear 2 bits; text and answers grow with every turn, "
        "so they leave 16 bit as well, for 4",
    ),
    Rule(
        TEXT,
        False,
        "all tokens share one stream of KIVI's groups with end points moved in, which costs "
        "text no more than KIVI does and takes fewer bytes",
    ),
)
# What a model's facts add to the reason.
NOTES: tuple[Callable[[ModelFacts], str | None], ...] = (
    lambda facts: _of_layers(facts.windows, facts, "see a window alone and stay in 16 bit"),
    lambda facts: _of_layers(facts.states, facts, "keep a state of fixed size, as it is"),
    lambda facts: _of_layers(facts.crosses, facts, "keep K and V of pictures, in 16 bit"),
    lambda facts: _of_layers(facts.readers, facts, "read K and V of an earlier layer"),
    lambda facts: facts.against_kernels and f"no kernel decodes it: {facts.against_kernels}",
)


@dataclass(frozen=True)
class Usual:
    """A sequence that bytes are predicted for; images: as `duotone.plan` has them."""

    visual_tokens: int
    text_tokens: int
    new_tokens: int
    images: int = 1

    @property
    def tokens(self) -> int:
        """Count of all tokens."""
        return self.visual_tokens + self.text_tokens + self.new_tokens


@dataclass(frozen=True)
class Recommendation:
    """A spec for a model, its scheme's name, and why.

    token_bytes, own_token_bytes: of a token of `usual`, with the spec and in the model's own cache.
        States and pictures of fixed size are in neither.
    """

    model_type: str
    name: str
    spec: CacheSpec
    why: tuple[str, ...]
    usual: Usual
    token_bytes: float
    own_token_bytes: float

    @property
    def times_smaller(self) -> float:
        """Bytes of the model's own cache per byte of this one."""
        return self.own_token_bytes / self.token_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-safe data."""
        return {**asdict(self), "spec": self.spec.to_dict(), "times_smaller": self.times_smaller}

    @property
    def summary(self) -> str:
        """Scheme and bytes in one sentence, without a full stop."""
        sizes = f"{_size(self.token_bytes)} a token instead of {_size(self.own_token_bytes)}"
        return (
            f"{self.name} for {self.model_type}: {sizes} ({self.times_smaller:.1f}x smaller) over "
            f"{self.usual.tokens:,} tokens"
        )

    def __str__(self) -> str:
        return "\n".join([f"{self.summary}.", *(f"- {reason}" for reason in self.why)])


def recommend(
    model_or_config: PreTrainedModel | PreTrainedConfig | ModelFacts,
    *,
    visual_mask: Tensor | None = None,
    tokens: int | None = None,
) -> Recommendation:
    """Choose the spec that `enable` takes where none is given, by the model's config alone.

    Its weights are not read and nothing runs. visual_mask: as `enable` has it, for a model whose
    config does not say which tokens are visual. A text model with tokens that it marks gets a
    scheme of pictures. tokens: of the sequence that bytes are of, by default 4,096 or all that the
    model has positions for.
    Errors: ValueError for an unsupported model, or a mask of another shape.
    """
    known = isinstance(model_or_config, ModelFacts)
    facts = model_or_config if known else checked_facts(model_or_config, visual_mask)
    facts = with_visual(facts, visual_mask)
    config = None if known else getattr(model_or_config, "config", model_or_config)
    rule, spec, said = _first_that_fits(facts)
    usual = usual_sequence(facts, config, tokens)
    given = (usual.visual_tokens, usual.text_tokens, usual.new_tokens, usual.images)
    held = cache_bytes(facts, spec, *given)
    notes = (note for make in NOTES if (note := make(facts)))
    if held.tokens >= held.dense_tokens:
        said.append(f"its own cache keeps {facts.window} tokens and is no larger at this length")
    return Recommendation(
        model_type=facts.model_type,
        name=rule.scheme,
        spec=spec,
        why=(rule.why, *said, *notes),
        usual=usual,
        token_bytes=held.tokens / usual.tokens,
        own_token_bytes=held.dense_tokens / usual.tokens,
    )


def calibrates(facts: ModelFacts) -> bool:
    """True for a model whose pictures `duotone.calibrated` takes, as spans in two parts."""
    return facts.is_multimodal and not facts.has_latents and not any(facts.sliding)


def say_once(chosen: Recommendation, facts: ModelFacts) -> None:
    """Print a recommendation's summary on stderr, the first time in a process."""
    line = f"duotone: {chosen.summary}; duotone.recommend(model) says why."
    if calibrates(facts):
        line += f" {SMALLER}: duotone.calibrated(model, processor)."
    with _LOCK:
        if line in _SAID:
            return
        _SAID.add(line)
    print(line, file=sys.stderr)


def usual_sequence(
    facts: ModelFacts, config: PreTrainedConfig | None, tokens: int | None = None
) -> Usual:
    """A prompt of pictures or text with its answer; by default no longer than the positions."""
    text = None if config is None else config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    total = tokens or min(TOKENS, positions or TOKENS)
    visual = int(VISUAL_SHARE * total) if facts.is_multimodal else 0
    new = total - int((VISUAL_SHARE + TEXT_SHARE) * total)
    picture = tokens_of_picture(config)
    images = max(1, visual // picture) if picture else 1
    return Usual(visual, total - visual - new, new, images)


def tokens_of_picture(config: PreTrainedConfig | None) -> int | None:
    """Visual tokens of a picture, where the config fixes them."""
    sizes = (getattr(config, field, None) for field in PICTURE_FIELDS)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _first_that_fits(facts: ModelFacts) -> tuple[Rule, CacheSpec, list[str]]:
    """(rule, spec, words against earlier ones). Errors: ValueError where none fits."""
    said: list[str] = []
    for rule in (each for each in RULES if facts.is_multimodal or not each.of_pictures):
        for spec, words in _forms(rule, facts):
            try:
                check_spec(facts, spec)
            except ValueError as error:
                said.append(f"not {words}: {error}")
            else:
                return rule, spec, [*said, *([f"so {words}"] if said else [])]
    raise ValueError("a recommended scheme must fit the model; " + " ".join(said))


def _forms(rule: Rule, facts: ModelFacts) -> Iterator[tuple[CacheSpec, str]]:
    """A rule's spec, then with groups that the model's heads allow; each in words."""
    spec = named(rule.scheme)
    yield spec, rule.scheme
    fitted = with_fitting_groups(spec, facts)
    if fitted != spec:
        yield fitted, f"{rule.scheme} with groups of channels that divide the heads"


def with_fitting_groups(spec: CacheSpec, facts: ModelFacts) -> CacheSpec:
    """`spec` with groups along channels that divide the heads of all layers."""
    dims = list(zip(*(shape.head_dims for shape in facts.shapes), strict=True))
    policies = {name: getattr(spec, name) for name in ("visual", "background", "text")}
    fitted = {
        name: KVSpec(_fitted(kv.key, dims[0]), _fitted(kv.value, dims[1]))
        for name, kv in policies.items()
        if isinstance(kv, KVSpec)
    }
    return spec.replace(**fitted)


def _fitted(tensor: TensorSpec, dims: tuple[int, ...]) -> TensorSpec:
    group = tensor.group
    fits = group is None or all(dim % group == 0 or group % dim == 0 for dim in dims)
    if tensor.along != "channels" or fits:
        return tensor
    common = math.gcd(group, *dims)
    return tensor.replace(group=common if common >= LEAST_GROUP else None)


def _of_layers(layers: tuple[int, ...], facts: ModelFacts, what: str) -> str | None:
    count = facts.layers + len(facts.own)
    return f"{len(layers)} of {count} layers {what}" if layers else None


def _size(count: float) -> str:
    """Bytes of a token in decimal units."""
    units = (("MB", 1e6), ("KB", 1e3), ("bytes", 1))
    unit, size = next((each for each in units if count >= each[1]), units[-1])
    return f"{count / size:.{1 if count < 10 * size else 0}f} {unit}"
