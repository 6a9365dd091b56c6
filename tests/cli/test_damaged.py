"""Damaged files on the command line: one line that names the file, and no traceback."""

from pathlib import Path

import pytest
import torch
from cli_runs import error_of

import duotone
from duotone import KVSpec, TensorSpec
from duotone.hf.fingerprint import fingerprint
from duotone.hf.weights.checkpoint import save
from duotone.quant.bases import Bases

from mquant_setups import quantized

DAMAGES = {
    "cut": lambda raw: raw[:-9],
    "empty": lambda raw: b"",
    "flipped": lambda raw: raw[:-5] + bytes([raw[-5] ^ 16]) + raw[-4:],
    "noise": lambda raw: bytes(range(256)) * 3,
    "deep": lambda raw: b"[" * 10_000,
}
FILES = ("quantized.safetensors", "duotone_weights.json", "config.json", "generation_config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    loaded, _ = quantized("rtn-w8a8")
    return save(loaded.model, tmp_path_factory.mktemp("models") / "q")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint(name: str, damage: str, folder: Path) -> None:
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    try:
        told = error_of("generate", "--model", folder, "what is this ?")
    finally:
        path.write_bytes(whole)
    assert str(folder) in told


def test_a_checkpoint_without_its_tensors(folder: Path) -> None:
    path = folder / "quantized.safetensors"
    path.rename(folder / "away")
    told = error_of("generate", "--model", folder, "what is this ?")
    (folder / "away").rename(path)
    assert "it has no quantized.safetensors" in told


@pytest.mark.parametrize("damage", DAMAGES)
def test_bases_that_a_spec_names(damage: str, tmp_path: Path, tiny, picture: Path) -> None:
    model, path = tiny.model, tmp_path / "mine.safetensors"
    text = model.config.text_config
    shape = (text.num_hidden_layers, text.num_key_value_heads, text.head_dim, text.head_dim)
    matrices = torch.eye(text.head_dim).expand(shape)
    Bases(matrices, matrices, {"fingerprint": fingerprint(model)}).save(path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    key, value = (TensorSpec(2, transform=f"klt:{path}#0.{which}") for which in ("key", "value"))
    spec = duotone.CacheSpec(visual=KVSpec(key, value))
    (tmp_path / "mine.json").write_text(spec.to_json())
    asked = ("generate", "--scheme", tmp_path / "mine.json", "--image", picture, "what is this ?")
    assert str(path) in error_of(*asked)
