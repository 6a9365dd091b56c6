"""Answers by graphs and by growing buffers, and their comparison in float64."""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from replay_double import growing
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import StoppingCriteria

import duotone
from duotone import CacheSpec
from duotone.tools.slow_paths import SlowPathWarning

from exactly import FP64, rounding_as
from families import TEXT_ONLY, inputs, logit_error, typed

NEW = 20


class StopAt(StoppingCriteria):
    def __call__(self, ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 40)


def batch_of(name: str) -> dict[str, Tensor]:
    """Left-padded rows: images at different places, two images, none at all."""
    if name in TEXT_ONLY:
        return inputs(name, [[23], [9], [16]])
    rows = [[3, "image", 9, "image", 4], [11, "image", 2], [7]]
    # Some processors hand all rows the same number of pictures.
    return inputs(name, rows[:1] * 2 if name == "smolvlm" else rows)


def answer(
    model: PreTrainedModel,
    spec: CacheSpec,
    given: dict,
    graphs: bool = True,
    visual_mask: Tensor | None = None,
    **settings: Any,
) -> Any:
    call = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    call |= {"output_logits": True, **settings}
    with (
        rounding_as(model.dtype),
        nullcontext() if graphs else growing(),
        duotone.enable(model, spec, visual_mask=visual_mask) as session,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", SlowPathWarning)
        out = model.generate(**typed(model, given), **call)
        out.session = session
        return out


def assert_same(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    error = logit_error(torch.stack(ours.logits), torch.stack(theirs.logits))
    assert error < FP64, f"logits differ by {error:.2e} of their spread"
