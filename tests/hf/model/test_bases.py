"""Calibrated bases on real models: exact without rounding, close at 8 bits, refused elsewhere."""

from pathlib import Path

import pytest
import torch
from test_generate import assert_same_run, batch_of, run
from transformers import PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.hf.model.facts import model_facts
from duotone.hf.model.fingerprint import fingerprint
from duotone.quant.bases import Bases
from duotone.quant.spec import LayerRule

from families import FAMILIES, TEXT_ONLY, tiny_model

EIGHT = TensorSpec(8)


def some_bases(model: PreTrainedModel, path: Path, **header: object) -> str:
    """Bases that are no rotations, of a model's shape; returns the file."""
    layers, head = model_facts(model).layers, model_facts(model).shape
    shape = (2, layers, head.kv_heads, head.head_dim, head.head_dim)
    key, value = torch.eye(head.head_dim) + 0.3 * torch.randn(shape) / head.head_dim**0.5
    file = path / "bases.safetensors"
    Bases(key, value, {"fingerprint": fingerprint(model), **header}).save(file)
    return str(file)


def turned(file: str, layer: int, **fields: object) -> KVSpec:
    """A policy in the bases of one layer."""
    return KVSpec(*(TensorSpec(8, transform=f"klt:{file}#{layer}.{w}", **fields)
                    for w in ("key", "value")))  # fmt: skip


def spec_of(model: PreTrainedModel, file: str, text: bool) -> CacheSpec:
    """Every layer in its own bases; text as a stream in groups of 4, or visual spans alone."""
    name, fields = ("text", {"group": 4}) if text else ("visual", {})
    layers = [turned(file, i, **fields) for i in range(model_facts(model).layers)]
    rules = tuple(LayerRule(i, i + 1, **{name: one}) for i, one in enumerate(layers))
    both = {"visual": "text", "text": layers[0]} if text else {"visual": layers[0]}
    return CacheSpec(**both, sink=1, recent=3, layers=rules)


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_change_of_basis_changes_nothing(name: str, tmp_path: Path) -> None:
    model, given = tiny_model(name), batch_of(name)
    spec = spec_of(model, some_bases(model, tmp_path), text=name in TEXT_ONLY)
    assert_same_run(run(model, given, spec), run(model, given))


def test_bases_of_another_model_are_refused(tmp_path: Path) -> None:
    model = tiny_model("internvl")
    spec = spec_of(model, some_bases(model, tmp_path, fingerprint="another"), text=False)
    with pytest.raises(ValueError, match="belong to a model with fingerprint another"):
        QuantizedCache(model, spec)
    with pytest.raises(ValueError, match="belong to a model"), duotone.enable(model, spec):
        pass


def test_keys_need_bases_of_keys(tmp_path: Path) -> None:
    model = tiny_model("internvl")
    file = some_bases(model, tmp_path)
    value = TensorSpec(8, transform=f"klt:{file}#0.value")
    with pytest.raises(ValueError, match="a basis of the value cannot serve the key"):
        QuantizedCache(model, CacheSpec(visual=KVSpec(value, value)))


def test_bases_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = tiny_model("internvl")
    file = some_bases(model, tmp_path)
    fewer = Bases.load(file)
    Bases(fewer.key[:1], fewer.value[:1], fewer.header).save(tmp_path / "fewer.safetensors")
    with pytest.raises(ValueError, match="needs bases of"):
        QuantizedCache(model, CacheSpec(visual=turned(str(tmp_path / "fewer.safetensors"), 0)))


def test_fingerprints_know_models_not_weights() -> None:
    one, same, other = tiny_model("llama"), tiny_model("llama"), tiny_model("qwen2")
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
