import pytest
import torch

from duotone.quant import bases as module
from duotone.quant.bases import Bases, Reference, bases, turn
from duotone.quant.rotation import into_basis, out_of_basis, query_into_basis

LAYERS, HEADS, CHANNELS = 3, 2, 8


@pytest.fixture
def file(tmp_path) -> str:
    torch.manual_seed(0)
    key, value = torch.randn(2, LAYERS, HEADS, CHANNELS, CHANNELS)
    path = tmp_path / "some.safetensors"
    Bases(key, value, {"fingerprint": "f"}).save(path)
    return str(path)


def test_references_are_read_as_they_are_written() -> None:
    for reference in (Reference("a/b#c.safetensors", 12, "key"), Reference("name", 0, "value")):
        assert Reference.parse(str(reference)) == reference
    for text in ("", "hadamard", "klt:#1.key", "klt:a#1", "klt:a#x.key", "klt:a#1.query"):
        assert Reference.parse(text) is None


def test_files_come_back_as_they_were(file) -> None:
    read = Bases.load(file)
    assert read.header == {"fingerprint": "f"}
    assert read.key.shape == read.value.shape == (LAYERS, HEADS, CHANNELS, CHANNELS)
    assert bases(file) is bases(file)


@pytest.mark.parametrize("group", [1, 3])
def test_products_and_sums_do_not_know_the_basis(file, group) -> None:
    key, value = torch.randn(2, 5, HEADS, 7, CHANNELS, dtype=torch.float64)
    query = torch.randn(5, HEADS * group, 4, CHANNELS, dtype=torch.float64)
    weights = torch.rand(5, HEADS * group, 4, 7, dtype=torch.float64)

    def each(x):
        return x.repeat_interleave(group, 1)

    at = f"klt:{file}#1.key"
    turned = query_into_basis(query, at) @ each(into_basis(key, at)).transpose(-1, -2)
    assert torch.allclose(turned, query @ each(key).transpose(-1, -2), rtol=1e-9, atol=1e-9)
    at = f"klt:{file}#2.value"
    summed = out_of_basis(weights @ each(into_basis(value, at)), at)
    assert torch.allclose(summed, weights @ each(value), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(into_basis(value, at), value)


def test_layers_have_bases_of_their_own(file) -> None:
    x = torch.randn(1, HEADS, 3, CHANNELS)
    first, second = (into_basis(x, f"klt:{file}#{i}.key") for i in (0, 1))
    assert not torch.allclose(first, second)
    with pytest.raises(ValueError, match="3 layers; got layer 3"):
        turn(f"klt:{file}#3.key", torch.float32, x.device)


def test_bad_files_say_what_is_wrong(tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="nowhere cannot be read as calibrated bases"):
        Bases.load("nowhere")
    text = tmp_path / "text.safetensors"
    text.write_text("no tensors")
    with pytest.raises(ValueError, match="is not a file of calibrated bases"):
        Bases.load(str(text))
    eye = torch.eye(2).expand(1, 1, 2, 2)
    with pytest.raises(ValueError, match="must be finite"):
        Bases(eye / 0, eye, {}).save(tmp_path / "nan.safetensors")
    monkeypatch.setattr(module, "FORMAT", 99)
    Bases(eye, eye, {}).save(tmp_path / "new.safetensors")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="is no file of calibrated bases"):
        Bases.load(str(tmp_path / "new.safetensors"))
