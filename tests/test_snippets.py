"""The Python on the pages for users runs as it stands."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from duotone.models import duotone_tiny_path

DOCS = Path(__file__).parents[1] / "docs"
# A name on the hub, a recipe that solves for weights and a number of samples, in a test's size.
SMALLER = {
    "OpenGVLab/InternVL3-1B-hf": "small",
    "mquant-w4a8": "rtn-w8a8",
    "samples=64": "samples=2",
}


def blocks(page: str) -> list[str]:
    """The code blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


def run(page: str, smaller: dict[str, str] | None = None) -> None:
    """All blocks of a page in one namespace, with the page's lines in tracebacks."""
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(page), 1):
        for text, replacement in (smaller or {}).items():
            block = block.replace(text, replacement)
        exec(compile(block, f"{page}, block {number}", "exec"), names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both pages run: a model of the embedded one's kind, and two samples."""
    home = tmp_path_factory.mktemp("snippets")
    config = transformers.AutoConfig.from_pretrained(duotone_tiny_path())
    text, vision = config.text_config, config.vision_config
    text.num_hidden_layers, text.layer_types = 2, text.layer_types[:2]
    vision.num_hidden_layers, vision.num_attention_heads = 1, 2
    text.intermediate_size = vision.hidden_size = vision.intermediate_size = 64
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(home / "small")
    transformers.AutoProcessor.from_pretrained(duotone_tiny_path()).save_pretrained(home / "small")
    Image.new("RGB", (256, 256), "navy").save(home / "photo.png")
    row = {"images": ["photo.png"], "question": "What is this?", "answers": ["a wall"]}
    lines = [json.dumps({**row, "question": q}) for q in ("What is this?", "Which colour?")]
    (home / "mine.jsonl").write_text("\n".join(lines))
    return home


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Path:
    """The folder after docs/quantize.md, which leaves a model in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert all(any(text in block for block in blocks("quantize.md")) for text in SMALLER)
        run("quantize.md", SMALLER)
    return folder


def test_quantize_md(quantized: Path) -> None:
    assert (quantized / "w4a8" / "config.json").is_file()


def test_enable_md(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(quantized)
    assert len(blocks("enable.md")) > 10
    run("enable.md", {"load()": 'load("small")'})


def test_a_broken_snippet_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text("```python\nx = 1\n```\ntext\n```python\nx.missing\n```\n")
    monkeypatch.setitem(globals(), "DOCS", tmp_path)
    with pytest.raises(AttributeError, match="missing"):
        run("page.md")
