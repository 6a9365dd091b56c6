"""Damaged files on the command line: one line that names the file, and no traceback."""

from pathlib import Path

import pytest
from cli_runs import error_of

from duotone.hf.weights.checkpoint import save

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
        told = error_of("compare", "--model", folder)
    finally:
        path.write_bytes(whole)
    assert str(folder) in told


def test_a_checkpoint_without_its_tensors(folder: Path) -> None:
    path = folder / "quantized.safetensors"
    path.rename(folder / "away")
    told = error_of("compare", "--model", folder)
    (folder / "away").rename(path)
    assert "it has no quantized.safetensors" in told
