"""Small models in the place of those that commands load, and a picture."""

import pytest

from duotone.loading import Loaded
from tiny_text import LetterTokenizer, text_model
from tiny_vlm import TinyProcessor, noise, tiny_model


@pytest.fixture
def tiny(monkeypatch):
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    monkeypatch.setattr("duotone.loading.load", lambda name, device: loaded)
    return loaded


@pytest.fixture
def words_only(monkeypatch):
    loaded = Loaded("words", text_model(), LetterTokenizer())
    monkeypatch.setattr("duotone.loading.load", lambda name, device, **options: loaded)
    return loaded


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "noise.png"
    noise(0).save(path)
    return path
