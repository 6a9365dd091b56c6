"""Every tensor of a saved cache is there, in its type and shape, with numbers; or it is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_caches import SPECS, content, next_logits, rewrite, saved
from torch import Tensor
from transformers import PreTrainedModel

from duotone import QuantizedCache

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


def refused(path: Path, model: PreTrainedModel, match: str, change: Change) -> None:
    """The file, changed and signed anew, is refused in these words; then it is whole again."""
    whole = path.read_bytes()
    rewrite(path, change)
    with pytest.raises(ValueError, match=match) as caught:
        QuantizedCache.load(path, model)
    assert str(path) in str(caught.value)
    path.write_bytes(whole)


# Kinds of caches, and ends of the names of tensors that no other kind has.
FIELDS = {
    "lagging": ("lag_values", "lag_lengths"),
    "factors": ("stream.key.factor", "stream.value.factor"),
    "codebook": ("stream.key.codes", "stream.key.scale", "stream.value.scale"),
    "heads": ("visual.value.scale", "visual.value.zero_point"),
    "8-bit parameters": ("visual.key.scale", "visual.key.zero_point", "visual.key.classes"),
    "hybrid": ("key_norm", "stream.key.symmetric", "stream.value.slot"),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_fields_are_needed_in_their_type_and_shape(kind: str, path: Path) -> None:
    model, expected = saved(path, SPECS[kind])
    _, held = content(path)
    for name in (f"layers.2.{end}" for end in FIELDS[kind]):
        old = held[name]
        others = {
            "is missing|needs its|need their": None,
            f"{name} must be torch": old.to(torch.int16),
            f"{name} must be of shape": old[None],
        }
        if old.shape[-1] > 1:
            others[f"{name} must be of shape "] = old[..., 1:]
        for match, new in others.items():
            refused(path, model, match, lambda header, tensors, n=name, x=new: put(tensors, n, x))
        if old.is_floating_point():
            for number in (float("nan"), float("inf"), -float("inf")):
                bad = old.clone()
                bad.view(-1)[0] = number
                refused(
                    path,
                    model,
                    f"numbers must be finite; got inf or NaN in {name}",
                    lambda header, tensors, n=name, x=bad: put(tensors, n, x),
                )
    assert torch.equal(next_logits(model, QuantizedCache.load(path, model)), expected)


def put(tensors: dict[str, Tensor], name: str, new: Tensor | None) -> None:
    """Replace a tensor, or leave it out."""
    del tensors[name]
    if new is not None:
        tensors[name] = new.contiguous()


def test_a_stream_that_keeps_exact_values_has_them(path: Path) -> None:
    """Without them attention would read codes in their place, and say other things."""
    model, _ = saved(path, SPECS["lagging"])
    names = [f"layers.1.lag_{part}" for part in ("values", "lengths")]

    def change(most: int) -> Change:
        values, lengths = (content(path)[1][name] for name in names)
        values = values.repeat(1, 1, 2, 1)[:, :, :most]
        new = dict(zip(names, (values, lengths.clamp_max(0) + most), strict=True))
        return lambda header, tensors: [put(tensors, n, x) for n, x in new.items()]

    refused(
        path,
        model,
        r"packed V needs its exact V; got no layers\.1\.lag_values",
        lambda header, tensors: [tensors.pop(name) for name in names],
    )
    refused(path, model, "exact V is of 7 tokens at most; got 8", change(8))
    lengths = content(path)[1][names[1]]
    for wrong in (lengths - 8, lengths + 8):
        refused(
            path,
            model,
            "exact V must be of packed tokens",
            lambda header, tensors, x=wrong: put(tensors, names[1], x),
        )


def test_numbers_of_slots_without_tokens_may_be_any(path: Path) -> None:
    """A row past the last block of a sequence is read by nobody."""
    model, expected = saved(path, SPECS["factors"])
    lengths = content(path)[1]["ledgers.0.stream.lengths"]
    assert lengths.min() < lengths.max()

    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for row, length in enumerate(lengths.tolist()):
            tensors["layers.0.stream.key.factor"][row, :, length:] = float("nan")

    rewrite(path, change)
    assert torch.equal(next_logits(model, QuantizedCache.load(path, model)), expected)
