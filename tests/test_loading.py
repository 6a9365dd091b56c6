import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub.errors import RepositoryNotFoundError

from duotone.loading import Loaded, image_token_ids, load, load_config
from duotone.report.provenance import stamp, write_new_json


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"folder with a config\.json"):
        load(str(tmp_path))


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-family"}')
    for function in (load, load_config):
        with pytest.raises(ValueError, match="a model must be a folder or hub name"):
            function(str(tmp_path))


def test_a_name_that_is_no_folder_is_asked_of_the_hub_once(monkeypatch):
    asked = []

    def unreachable(url, **_):
        asked.append(url)
        raise RuntimeError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    for function in (load, load_config):
        with pytest.raises(ValueError, match="no folder 'missing/model' here, and the hub does"):
            function("missing/model")
    assert len(asked) == 2


def test_a_name_that_the_hub_does_not_know_is_refused(monkeypatch):
    def unknown(url, **_):
        response = SimpleNamespace(headers={}, request=None)
        raise RepositoryNotFoundError("404", response=response)

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unknown)
    with pytest.raises(ValueError, match="the hub has no such model"):
        load_config("missing/model")


def test_a_config_alone_is_read_from_a_folder_or_its_file(tmp_path):
    transformers.LlamaConfig(num_hidden_layers=3).save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        assert load_config(str(name)).num_hidden_layers == 3


def test_picture_tokens_come_from_the_config():
    assert image_token_ids(transformers.LlamaConfig()) == ()
    assert image_token_ids(transformers.InternVLConfig(image_token_id=7)) == (7,)
    config = transformers.Qwen2VLConfig(image_token_id=5, video_token_id=6)
    assert image_token_ids(config) == (5, 6)


def test_the_embedded_model_loads_in_16_bit():
    loaded = load(device="cpu")
    assert isinstance(loaded, Loaded)
    assert loaded.takes_images
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training


def test_a_device_that_is_none_is_refused_in_one_line(monkeypatch):
    def no_gpu(*args, **more):
        raise AssertionError("Torch not compiled with CUDA enabled")

    for name in ("banana", "cuda:x", "meta"):
        with pytest.raises(ValueError, match=rf"^the device must be .* got '{name}': .*Use "):
            load(device=name)
    monkeypatch.setattr(torch, "empty", no_gpu)
    with pytest.raises(ValueError, match="got 'cuda': Torch not compiled with CUDA enabled"):
        load(device="cuda")


def test_result_headers_name_versions_and_device():
    header = stamp("cpu")
    assert header["versions"]["torch"] == torch.__version__
    assert header["device"].startswith("CPU")
    assert header["created"].endswith("+00:00")


def test_result_files_are_never_overwritten(tmp_path):
    path = write_new_json(tmp_path / "new/folder/result.json", {"a": 1})
    with pytest.raises(ValueError, match="never overwritten"):
        write_new_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
