"""Everything that must follow a family's tokens when they move: K and V, and the state beside them.

After a prompt and steps in which a group has left its window, the cache is reordered, selected,
repeated, cropped, copied or saved. Then all state is as it was, in its new places, and so are the
logits of one more token.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_specs import STREAM
from torch import Tensor

from duotone import QuantizedCache
from duotone.hf.cache.states import materialize

from families import FAMILIES, HYBRIDS, inputs, logit_error, tiny_model

ALL = {**FAMILIES, **HYBRIDS}
# State beside K and V of packed layers, by family; families without any are left out. Positions of
# pictures (`rope_deltas`) are the model's: transformers moves them with no cache.
CONV, LINEAR, WINDOW = {"conv_states"}, {"conv_states", "recurrent_states"}, {"keys", "values"}
BESIDE = {
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl"), CONV),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"), LINEAR),
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), LINEAR),
    **dict.fromkeys(("nemotron_h", "granitemoehybrid", "bamba", "jamba"), LINEAR),
    **dict.fromkeys(
        ("gemma3", "gemma3n_text", "gemma4", "gemma4_e2b", "cohere2", "llama4", "aya_vision"),
        WINDOW,
    ),
    "paligemma2": WINDOW,
}
STEPS = 6  # a group of 4 leaves a window of 3
FEW = ("llama", "qwen2_vl", "gemma3", "qwen3_5", "lfm2", "gemma4_e2b")
NAMES = [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in ALL]
NEAR = 1e-4


def filled(name: str) -> QuantizedCache:
    """A cache of two rows after a prompt and `STEPS` steps."""
    model = tiny_model(name)
    cache = QuantizedCache(model, STREAM)
    given = inputs(
        name, [[3, "image", 9], [3, "image", 4]] if ALL[name].is_multimodal else [[17], [7]]
    )
    with torch.no_grad():
        model(**given, past_key_values=cache)
    cache.padding = given["attention_mask"]
    for token in range(STEPS):
        step(name, cache, [20 + token, 40 + token])
    return cache


def step(name: str, cache: QuantizedCache, tokens: list[int]) -> Tensor:
    """Logits of one more token per row."""
    ids, model = torch.tensor(tokens)[:, None], tiny_model(name)
    cache.padding = torch.cat([cache.padding, torch.ones_like(ids)], 1)
    given = {"input_ids": ids, "attention_mask": cache.padding}
    if any(hasattr(module, "rope_deltas") for module in model.modules()):
        given["position_ids"] = torch.full((3, *ids.shape), cache.length)
    elif name == "gemma3":
        given |= ALL[name].extra(ids)
    with torch.no_grad():
        return model(**given, past_key_values=cache).logits


def state_of(cache: QuantizedCache) -> dict[str, Tensor]:
    """All tensors by name: K and V in logical order, states and windows."""
    timeline, found = cache.timeline, dict(cache.timeline.own.tensors)
    for index, shape in enumerate(cache.facts.shapes):
        none = torch.zeros(timeline.batch, shape.kv_heads, 0, shape.head_dim)
        for which in ("key", "value"):
            found[f"{which}.{index}"] = materialize(timeline, index, which, none)
    return found


def rows_of(state: dict[str, Tensor], index: list[int]) -> dict[str, Tensor]:
    return {name: x[index] for name, x in state.items()}


def assert_state(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert torch.equal(x, theirs[name]), name


MOVES: dict[str, tuple[Callable[[QuantizedCache], None], list[int]]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "copy a row": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
}


@pytest.mark.parametrize("name", NAMES)
def test_state_follows_its_tokens(name: str, tmp_path: Path) -> None:
    cache = filled(name)
    kinds = {kind.split(".")[2] for kind in cache.timeline.own.tensors}
    assert kinds == BESIDE.get(name, set())
    before, tokens = state_of(cache), [7, 8]
    wanted = step(name, copy.deepcopy(cache), tokens)
    for move, rows in MOVES.values():
        moved = copy.deepcopy(cache)
        move(moved)
        moved.padding = cache.padding[rows]
        assert_state(state_of(moved), rows_of(before, rows))
        found = step(name, moved, [tokens[row] for row in rows])
        assert logit_error(found, wanted[rows]) < NEAR
    cache.save(tmp_path / "cache.safetensors")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", tiny_model(name))
    loaded.padding = cache.padding
    assert_state(state_of(loaded), before)
    assert logit_error(step(name, loaded, tokens), wanted) < NEAR


@pytest.mark.parametrize("name", NAMES)
def test_state_goes_back_or_says_that_it_cannot(name: str) -> None:
    cache = filled(name)
    padding, wanted = cache.padding, step(name, copy.deepcopy(cache), [7, 8])
    if BESIDE.get(name) in (CONV, LINEAR):
        with pytest.raises(NotImplementedError, match="no token can be taken out of a state"):
            cache.crop(-1)
    else:
        cache.activate_past_recording()
        step(name, cache, [3, 4])
        cache.crop(-1)
        cache.padding = padding
    assert logit_error(step(name, cache, [7, 8]), wanted) < NEAR


def test_the_comparison_sees_a_row_that_stays() -> None:
    cache = filled("qwen3_5")
    before = rows_of(state_of(cache), [1, 0])
    cache.reorder_cache(torch.tensor([1, 0]))
    for layer in cache.timeline.own.states.values():
        layer.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(AssertionError, match="states"):
        assert_state(state_of(cache), before)
