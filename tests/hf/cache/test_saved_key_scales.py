"""Files of caches with scaled keys: the same scales again, or a refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from grown_keys import STREAM, grown
from held_still import decode
from saved_caches import rewrite
from torch import Tensor
from transformers import PreTrainedModel

from duotone import QuantizedCache

from families import inputs, new_model

pytestmark = pytest.mark.filterwarnings("ignore:K that has channels far larger")
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


def saved(path: Path) -> tuple[PreTrainedModel, QuantizedCache]:
    """(model, cache) of a file."""
    model = grown("llama")
    cache = QuantizedCache(model, STREAM)
    with torch.no_grad():
        model(**inputs("llama", [[40], [17]]), past_key_values=cache)
    cache.save(path)
    return model, cache


def test_a_file_keeps_its_scales(path: Path) -> None:
    """Another model's w would read other keys, so a loaded cache has the one it was made by."""
    other, (model, cache) = new_model("llama"), saved(path)
    with pytest.raises(ValueError, match="another model's: weights"):
        QuantizedCache.load(path, other)
    for loaded in (
        QuantizedCache.load(path, model),
        QuantizedCache.load(path, other, waive=("weights",)),
    ):
        pairs = zip(loaded.timeline.scales.each, cache.timeline.scales.each, strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        assert loaded.memory().params_bytes == cache.memory().params_bytes
    assert not QuantizedCache(other, STREAM).timeline.scales.tensors
    step = torch.full((2, 1), 7)
    logits = [decode(model, each, step) for each in (QuantizedCache.load(path, model), cache)]
    assert torch.equal(*logits)


def of_layer_1(change: Callable[[Tensor], Tensor]) -> Change:
    """The tensor key_scales.1, changed."""
    return lambda header, tensors: tensors.update(
        {"key_scales.1": change(tensors["key_scales.1"]).contiguous()}
    )


DAMAGES: dict[str, tuple[Change, str]] = {
    "shape": (of_layer_1(lambda w: w[:, :, :3]), r"key_scales.1 must be floats \(2, 1, 16\)"),
    "zero": (of_layer_1(lambda w: w * 0), "key_scales.1 must be finite and positive"),
    "infinite": (of_layer_1(lambda w: w / 0), "key_scales.1 must be finite and positive"),
    "integers": (of_layer_1(lambda w: w.int()), "key_scales.1 must be floats"),
    "one missing": (
        lambda header, tensors: tensors.pop("key_scales.1"),
        r"must be those of layers \[0, 1, 2\]; got \[0, 2\]. Run the prompt again",
    ),
    "all missing": (
        lambda header, tensors: [tensors.pop(f"key_scales.{i}") for i in range(3)],
        r"must be those of layers \[0, 1, 2\]; got \[\]",
    ),
    "one too many": (
        lambda header, tensors: tensors.update({"key_scales.3": torch.ones(2, 1, 16)}),
        "no other tensors",
    ),
    "not in the header": (
        lambda header, tensors: header.pop("scaled_keys"),
        r"must be those of layers \[\]; got \[0, 1, 2\]",
    ),
    **{
        f"header {value!r}": (
            lambda header, tensors, value=value: header.update(scaled_keys=value),
            "must be those of layers",
        )
        for value in (None, 3, "x", [], [0, 2], {"0": 1}, float("nan"))
    },
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_scales_are_refused(path: Path, name: str) -> None:
    (change, message), (model, _) = DAMAGES[name], saved(path)
    rewrite(path, change)
    with pytest.raises(ValueError, match=message):
        QuantizedCache.load(path, model)
