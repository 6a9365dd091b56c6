from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.quant import bases as module
from duotone.quant.bases import Bases, Reference, bases, check_unchanged, turn, with_files
from duotone.quant.rotation import into_basis, out_of_basis, query_into_basis
from duotone.tools import tensor_file

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


BAD = {
    "NaN": (lambda e: e.masked_fill(torch.rand_like(e) < 0.1, float("nan")), "must be finite"),
    "inf": (lambda e: e * float("inf"), "must be finite"),
    "zeros": (lambda e: e * 0, "largest number must lie between"),
    "huge": (lambda e: e * 1e30, "largest number must lie between"),
    "singular": (lambda e: e[..., :1].expand_as(e).clone(), "must have inverses"),
    "nearly": (lambda e: e[..., :1] + 1e-6 * e, "must have inverses"),
    "one head": (lambda e: torch.cat([e[:, :1], e[:, 1:] * 0], 1), "in key of layer 0"),
    "integers": (lambda e: (100 * e).int(), "must be float32"),
    "double": (lambda e: e.double(), "must be float32"),
    "no layers": (lambda e: e[:0], "must be .layers, kv_heads, head_dim, head_dim"),
    "a matrix": (lambda e: e[0, 0], "must be .layers, kv_heads, head_dim, head_dim"),
    "not square": (lambda e: e[..., :5], "must be .layers, kv_heads, head_dim, head_dim"),
}


@pytest.mark.parametrize("name", BAD)
def test_matrices_that_no_numbers_come_back_from_are_refused(name, file) -> None:
    change, match = BAD[name]
    read = Bases.load(file)
    tensors = {"key": change(read.key).contiguous(), "value": read.value}
    if name in ("no layers", "a matrix", "not square"):
        tensors["value"] = tensors["key"].clone()
    header = read.header | {"format": module.FORMAT}
    tensor_file.write(file, tensors, header, "duotone")
    with pytest.raises(ValueError, match=f"some.safetensors cannot be used .*{match}"):
        Bases.load(file)


def test_files_of_before_there_were_checksums_are_read_if_one_insists(file) -> None:
    read = Bases.load(file)
    tensors = {"key": read.key, "value": read.value}
    save_file(tensors, file, metadata={"duotone": '{"fingerprint": "f", "format": 1}'})
    with pytest.raises(ValueError, match="has no checksum"):
        Bases.load(file)
    Bases.load(file, waive=("checksum",)).save(file)
    assert Bases.load(file).digest == read.digest


def test_a_file_that_changes_while_it_is_used_is_noticed(file) -> None:
    first = bases(file)
    Bases(first.key, first.value, first.header | {"more": 1}).save(file)
    check_unchanged(file)
    Bases(first.value, first.key, first.header).save(file)
    with pytest.raises(ValueError, match="others than this process has read before"):
        check_unchanged(file)
    Path(file).unlink()
    check_unchanged(file)
    assert bases(file) is first


def test_a_spec_finds_bases_that_lie_beside_its_file(tmp_path):
    tensor = TensorSpec(1, transform="klt:mine.safetensors#3.key")
    spec = CacheSpec(visual=KVSpec(tensor, tensor.replace(transform="hadamard")))
    file = tmp_path / "mine.json"
    file.write_text(spec.to_json())
    assert CacheSpec.from_file(file) == spec  # maybe of the working directory
    (tmp_path / "mine.safetensors").touch()
    found = CacheSpec.from_file(file).visual
    assert found.key.transform == f"klt:{tmp_path / 'mine.safetensors'}#3.key"
    assert found.value.transform == "hadamard"


def test_shipped_bases_stay_and_others_are_renamed():
    names = ["klt:preset:duotone-klt#0.key", "klt:a/b.safetensors#1.value", "klt", 3]
    renamed = with_files({"x": [{"transform": name} for name in names]}, str.upper)
    assert [each["transform"] for each in renamed["x"]] == [
        "klt:preset:duotone-klt#0.key",
        "klt:A/B.SAFETENSORS#1.value",
        "klt",
        3,
    ]
