"""`duotone demo` up to the moment at which its server waits for a browser."""

import json
import re
import socket
import urllib.request
import webbrowser

import pytest
from cli_runs import error_of, run

import duotone
from duotone.demo.server import DemoServer
from duotone.loading import load


@pytest.fixture
def served(monkeypatch):
    """Servers of commands, which end at once, and addresses that a browser opened."""
    seen = {"servers": [], "opened": []}

    def serve_forever(server):
        seen["servers"].append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(DemoServer, "serve_forever", serve_forever)
    monkeypatch.setattr(webbrowser, "open", seen["opened"].append)
    monkeypatch.setenv("DISPLAY", ":0")
    return seen


def test_says_where_the_page_is_and_opens_it(served):
    result = run("demo", "--port", 0, "--device", "cpu", "--max-new-tokens", 1)
    assert result.exit_code == 0, result.output
    (url,) = re.findall(r"duotone-tiny answers at (http://127.0.0.1:\d+/) ", result.stdout)
    assert served["opened"] == [url]
    (server,) = served["servers"]
    name, bits = server.demo.scheme, server.demo.bits
    assert server.demo.choices.spec(name, bits) == duotone.recommend(load(None, "cpu").model).spec
    assert not server.demo.gallery.folder.exists()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)


def test_begins_with_a_scheme_at_some_bits_or_a_file(served, tmp_path):
    common = ("--no-browser", "--port", 0, "--device", "cpu", "--max-new-tokens", 1)
    spec = duotone.scheme("kivi", bits=4)
    (tmp_path / "mine.json").write_text(json.dumps(spec.to_dict()))
    assert run("demo", *common, "-s", "kivi@4").exit_code == 0
    assert run("demo", *common, "-s", tmp_path / "mine.json").exit_code == 0
    at_bits, own = (server.demo for server in served["servers"])
    assert (at_bits.scheme, at_bits.bits) == ("kivi", 4)
    assert own.choices.spec("mine.json", None) == spec
    assert own.state()["schemes"][0]["name"] == own.scheme == "mine.json"
    assert served["opened"] == []


def test_opens_nothing_without_a_screen(served, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    result = run("demo", "--port", 0, "--device", "cpu", "--max-new-tokens", 1)
    assert result.exit_code == 0, result.output
    assert served["opened"] == []


def test_names_a_taken_port(served, tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = error_of("demo", "--no-browser", "--port", port)
    assert f"127.0.0.1:{port} cannot be had" in error


def test_refuses_models_without_pictures_and_unknown_schemes(words_only):
    assert "pictures need a multimodal model" in error_of("demo", "-s", "kivi")
    assert "scheme must be among" in error_of("demo", "-s", "kiwi")
