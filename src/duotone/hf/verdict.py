"""Verdict on one model: which parts of duotone take it, by the checks that a run makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from duotone.hf.cache.frozen import check_freezes
from duotone.hf.graphs.rules import reason_against_buffers, reason_against_capture
from duotone.hf.model.facts import TESTED_FAMILIES, model_facts
from duotone.hf.model.speaker import speaker_of
from duotone.hf.session import enable
from duotone.hf.weights.checkpoint import model_class
from duotone.hf.weights.weight_maps import weight_map
from duotone.quant import CacheSpec

NO_CACHE = "the cache is refused"


@dataclass(frozen=True)
class Support:
    """Refusals of a model under one scheme, and the inputs that tests give its type.

    cache, graphs, weights: words of the refusal, or None where nothing refuses the model. Graphs
        are decode steps in fixed buffers, captured on a CUDA device.
    takes_video: the model reads videos as inputs of their own, not as pictures alone.
    tested: inputs that the test suite gives models of this type; () for an untested type.
    """

    model_type: str
    cache: str | None
    graphs: str | None
    weights: str | None
    takes_video: bool
    tested: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-safe data."""
        return asdict(self)

    def words(self) -> dict[str, str]:
        """{part: "works", "works untested", "none" or "refused: ..."} of cache to video."""
        cells = {name: getattr(self, name) for name in ("cache", "graphs", "weights")}
        works = "works" if self.tested else "works untested"
        said = {name: works if why is None else f"refused: {why}" for name, why in cells.items()}
        return {**said, "video": self._video_words()}

    def _video_words(self) -> str:
        if not self.takes_video:
            return "none"
        if self.cache is not None:
            return f"refused: {NO_CACHE}"
        return "works" if "video" in self.tested else "works untested"


def supports(model_or_config: PreTrainedModel | PreTrainedConfig, spec: CacheSpec) -> Support:
    """Judge a model as `enable`, decode graphs and `duotone quantize` do; nothing of it runs.

    A model of a config is made on the meta device and takes no memory.
    Errors: ValueError for anything else, and for a config that transformers makes no model of.
    """
    given = model_or_config
    model = given if isinstance(given, PreTrainedModel) else model_on_meta(given)
    name = model.config.model_type
    cache, graphs = _cache_and_graphs(model, spec)
    return Support(
        model_type=name,
        cache=cache,
        graphs=graphs,
        weights=refusal(weight_map, model),
        takes_video=takes_video(model),
        tested=TESTED_FAMILIES.get(name, ()),
    )


def model_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of `config` without numbers.

    Errors: ValueError where transformers makes none; of a refused config with its refusal.
    """
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(
            f"expected a transformers model or its config; got a {type(config).__name__}. "
            "By name: duotone.loading.load_config(name)."
        )
    try:
        with torch.device("meta"):
            return model_class(config).from_config(config)
    except Exception as error:  # models of transformers fail in many ways; the cause says which
        if (why := refusal(model_facts, config)) is not None:
            raise ValueError(why) from error
        cause = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise ValueError(
            f"transformers must make a model of the config of {config.model_type!r}; got "
            f"{type(error).__name__}: {cause}. Correct the config, or install what it needs."
        ) from error


def refusal(check: Callable[..., Any], *given: Any) -> str | None:
    """Words of the ValueError that `check` raises, or None."""
    try:
        check(*given)
    except ValueError as error:
        return str(error)
    return None


def takes_video(model: PreTrainedModel) -> bool:
    """True if the forward pass has an input of its own for videos."""
    return "pixel_values_videos" in inspect.signature(model.forward).parameters


def _cache_and_graphs(model: PreTrainedModel, spec: CacheSpec) -> tuple[str | None, str | None]:
    """Words against the cache, and against decode steps by graphs."""
    try:
        with enable(model, spec):
            return None, _against_graphs(model, spec)
    except ValueError as error:
        return str(error), NO_CACHE


def _against_graphs(model: PreTrainedModel, spec: CacheSpec) -> str | None:
    """Reason against decode steps in fixed buffers or against their capture, while enabled."""
    if (why := refusal(check_freezes, 1, spec, model_facts(model))) is not None:
        return why
    # A model without numbers has no device that buffers could be on.
    if model.device.type != "meta" and (why := reason_against_buffers(model, model.device)):
        return why
    return reason_against_capture(speaker_of(model))
