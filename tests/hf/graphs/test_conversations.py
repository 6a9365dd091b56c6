"""All families in a whole conversation: a picture, another one later, and a step back.

All caches hear the same: their own one, exact codes in growing buffers, and 16 bit in fixed buffers
whose steps are replayed. Windows record what they let go, so that the cache can be cropped.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from family_configs import STATEFUL
from replay_double import ReplayDouble, double, growing
from small_specs import MIXED
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

import duotone
from duotone import CacheSpec, QuantizedCache

from exactly import FP64, rounding_as
from families import FAMILIES, HYBRIDS, exact_model, grid_pixels, inputs, logit_error, typed

__all__ = ["double"]  # a fixture

ALL = {**FAMILIES, **HYBRIDS}
# States of linear attention do not go back.
LINEAR = ("qwen3_5", "qwen3_5_moe", "minicpmv4_6", "minicpmv4_7", "lfm2_vl", *STATEFUL)
# Scores that are capped are not captured.
NAMES = [name for name in ALL if name != "paligemma2"]
# Their positions count the grids of all pictures, so that a later one needs all of them again.
TEXT_TURNS = [name for name, family in ALL.items() if family.pixels is grid_pixels]
if transformers.__version__.startswith("5.17"):
    # Their own windows fail at a second step that is recorded.
    WINDOWED = ("aya_vision", "cohere2", "gemma3", "gemma3n_text", "gemma4", "gemma4_e2b", "llama4")
    NAMES = [name for name in NAMES if name not in WINDOWED]
DENSE = CacheSpec(visual="dense", text="dense")
NEW, BACK = 8, 3
Turn = Callable[[dict[str, Tensor], Cache | None], Any]


def conversation(name: str, turn: Turn, cache: Cache | None) -> Tensor:
    """Logits of all answers [steps, 2, vocabulary]."""
    first = inputs(name, [[3, "image", 9], [3, "image", 6]])
    outs = [turn(first, cache)]
    cache = outs[0].past_key_values
    question = inputs(name, [[9] if name in TEXT_TURNS else [4, "image", 5]] * 2, seed=5)
    outs.append(turn(_later(name, first, outs[-1], question), cache))
    if name not in LINEAR:
        cache.activate_past_recording()
    outs.append(turn(_later(name, first, outs[-1], inputs(name, [[4], [4]], seed=6)), cache))
    if name not in LINEAR:
        cache.crop(-BACK)
        outs[-1].sequences = outs[-1].sequences[:, : -BACK - 1]
    outs.append(turn(_later(name, first, outs[-1], inputs(name, [[5], [5]], seed=7)), cache))
    return torch.cat([torch.stack(out.logits) for out in outs])


def _later(name: str, first: dict[str, Tensor], said: Any, question: dict) -> dict[str, Tensor]:
    """Everything said so far and a question, with the pixels of its picture."""
    ids = torch.cat([said.sequences, question["input_ids"]], 1)
    mask = torch.ones_like(ids)
    mask[:, : first["attention_mask"].shape[1]] = first["attention_mask"]
    return {**question, "input_ids": ids, "attention_mask": mask, **ALL[name].extra(ids)}


def turn_of(model: PreTrainedModel, **settings: Any) -> Turn:
    call = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **settings}

    def turn(given: dict[str, Tensor], cache: Cache | None) -> Any:
        given = {name: x.to(model.device) for name, x in typed(model, given).items()}
        out = model.generate(**given, **call, past_key_values=cache, output_logits=True)
        out.sequences = out.sequences.cpu()
        return out

    return turn


def of_its_own(name: str) -> Tensor:
    model = exact_model(name)
    own = DynamicCache(config=model.config.get_text_config(decoder=True))
    return conversation(name, turn_of(model), own)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", NAMES)
def test_exact_codes_say_the_same(name: str) -> None:
    model = exact_model(name)
    ours = conversation(name, turn_of(model), QuantizedCache(model, MIXED))
    assert logit_error(ours, of_its_own(name)) < 1e-4


@pytest.mark.slow
# Windows that record do not lie in fixed buffers.
@pytest.mark.filterwarnings("ignore:.*record their past:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_replayed_steps_say_the_same(double: type[ReplayDouble], name: str) -> None:
    model = exact_model(name)
    with rounding_as(model.dtype), duotone.enable(model, DENSE):
        ours = conversation(name, turn_of(model), None)
    with rounding_as(model.dtype):
        assert logit_error(ours, of_its_own(name)) < FP64
    # Of each answer, all steps but the prompt's and the one that warms up.
    assert double.replays >= 2 * (NEW - 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*record their past:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_replayed_few_bits_say_what_steps_one_by_one_do(
    double: type[ReplayDouble], name: str
) -> None:
    """The later picture makes new blocks, whose sizes a capture cannot ask for."""
    model = exact_model(name)
    said = []
    for path in (nullcontext(), growing()):
        with rounding_as(model.dtype), path, duotone.enable(model, MIXED):
            said.append(conversation(name, turn_of(model), None))
    assert logit_error(*said) < FP64
    assert double.replays >= 2 * (NEW - 2)
