"""A command without a package that it needs says so before it loads a model."""

import sys

import pytest
from cli_runs import error_of


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("pycocoevalcap.cider.cider", ("evaluate", "captions"), "duotone[eval]"),
        ("pycocoevalcap.cider.cider", ("tune", "captions", "-b", "1.3", "--no-plot"), "[eval]"),
        ("optuna", ("tune", "documents", "-b", "1.3", "--no-plot"), "duotone[tune]"),
    ],
)
def test_it_is_said_first(missing, command, extra, monkeypatch, tmp_path):
    def loads(*_, **__):
        raise AssertionError("the model was loaded first")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr("duotone.loading.load", loads)
    assert extra in error_of(*command)


def test_a_server_needs_vllm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = ("bench", "serve", "model", "--cache", "1GB", "--out", tmp_path / "out.json")
    assert "duotone[vllm]" in error_of(*asked)
