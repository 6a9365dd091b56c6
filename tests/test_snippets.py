"""The Python on the pages for users runs as it stands.

Pages that continue another one say so in a sentence, and run after its blocks.
"""

import ast
import builtins
import json
import os
import re
import subprocess
import sys
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


def pages() -> list[str]:
    """All pages with code blocks."""
    return sorted(page.name for page in DOCS.glob("*.md") if "\n```python\n" in page.read_text())


def blocks(page: str) -> list[str]:
    """The code blocks of a page in order, after those of the page that it continues."""
    text = (DOCS / page).read_text()
    before = re.findall(r"^These blocks continue those of \[.*\]\((.*)\):", text, re.M)
    own = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    return [block for other in before for block in blocks(other)] + own


FIRST = "enable.md"
CONTINUING = [p for p in pages() if p != FIRST and blocks(p)[0] == blocks(FIRST)[0]]
# Pages that run with the embedded model as they stand, and those with a test of their own.
WITH_THE_MODEL = ["calibrate.md", "choosing.md", "quickstart.md"]
OTHERS = ["evaluating.md", "quantize.md"]


def names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """(names that a statement may read, names that it makes)."""
    read, made = set(), set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.FunctionDef):
            made.add(node.name)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
    return read, made


def missing(block: str) -> tuple[set[str], set[str]]:
    """(names that a block wants of earlier ones, names that it makes)."""
    wanted, made = set(), set(dir(builtins))
    for statement in ast.parse(block).body:
        reads, makes = names(statement)
        wanted |= reads - made
        # What a statement makes itself, such as the parameter of a loop, it need not be given.
        made |= makes
    return wanted, made


def alone(page: str, number: int) -> str:
    """Block `number` of a page, behind the earlier ones that make what it reads."""
    every = blocks(page)
    kept, wanted = [every[number]], missing(every[number])[0]
    for block in reversed(every[:number]):
        reads, makes = missing(block)
        if wanted & (makes - set(dir(builtins))):
            kept.insert(0, block)
            wanted |= reads
    return "\n".join(kept)


def run(page: str, smaller: dict[str, str] | None = None) -> None:
    """All blocks of a page in one namespace, with the page's lines in tracebacks."""
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(page), 1):
        for text, replacement in (smaller or {}).items():
            block = block.replace(text, replacement)
        exec(compile(block, f"{page}, block {number}", "exec"), names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which both pages run: a model of the embedded one's kind, and two samples."""
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


def test_every_page_with_blocks_is_run() -> None:
    assert len(CONTINUING) > 6
    assert pages() == sorted({FIRST, *CONTINUING, *WITH_THE_MODEL, *OTHERS})


@pytest.mark.parametrize("page", [FIRST, *CONTINUING])
def test_a_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run(page, {"load()": 'load("small")'})


@pytest.mark.parametrize("page", WITH_THE_MODEL)
def test_a_page_with_the_embedded_model(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(page)
    printed = capsys.readouterr().out
    for quoted in re.findall(r'It prints "(.*?), \.\.\."', (DOCS / page).read_text()):
        assert quoted in printed


def test_the_block_of_evaluating_md_generates_from_the_packed_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    tokenizer = transformers.AutoProcessor.from_pretrained(duotone_tiny_path()).tokenizer
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    for part in (transformers.LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(folder / "words")
    (folder / "rows.jsonl").write_text(json.dumps({"question": "word " * 200, "answer": "one"}))
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"max_gen_toks": 8},
    }
    monkeypatch.chdir(folder)
    smaller = {"Qwen/Qwen2.5-1.5B-Instruct": "words", '["gsm8k_cot"]': repr([task])}
    assert all(text in blocks("evaluating.md")[0] for text in smaller)
    run("evaluating.md", smaller)
    shown = capsys.readouterr().out
    assert "exact_match" in shown
    assert "codes" in shown


def in_a_process(code: str, folder: Path, **env: str) -> None:
    """Run code in a folder. Errors: AssertionError with its traceback."""
    command = [sys.executable, "-c", code]
    paths = [str(Path(path).absolute()) for path in sys.path if path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def quantized_on_cpu(folder: Path) -> Path:
    """The folder after docs/quantize.md, which another process ran without a GPU."""
    code = "import test_snippets as t; t.run('quantize.md', t.SMALLER)"
    in_a_process(code, folder, CUDA_VISIBLE_DEVICES="")
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("page", [FIRST, *CONTINUING])
def test_blocks_alone_on_a_gpu(page: str, folder: Path) -> None:
    first = len(blocks(FIRST)) if page in CONTINUING else 0
    for number in range(first, len(blocks(page))):
        code = alone(page, number).replace("load()", 'load("small", device="cuda")')
        in_a_process(code, folder)


@pytest.mark.gpu
def test_few_bits_with_a_cache_of_few_bits_on_a_gpu(quantized_on_cpu: Path) -> None:
    (number,) = (i for i, block in enumerate(blocks("quantize.md")) if 'load("w4a8")' in block)
    code = alone("quantize.md", number).replace('load("w4a8")', 'load("w4a8", device="cuda")')
    assert "quantize_model" not in code
    in_a_process(code, quantized_on_cpu)


@pytest.mark.slow
def test_a_block_alone(folder: Path) -> None:
    (number,) = (i for i, block in enumerate(blocks("graphs.md")) if "graph_bytes" in block)
    in_a_process(alone("graphs.md", number).replace("load()", 'load("small")'), folder)


def test_a_block_brings_along_what_it_reads_and_no_more() -> None:
    every = blocks("peft.md")
    (wrapped,) = (i for i, block in enumerate(every) if "DataParallel" in block)
    (memory,) = (i for i, block in enumerate(every) if "session.memory()" in block)
    assert alone("peft.md", 0) == every[0]
    assert alone("peft.md", wrapped) == every[0] + "\n" + every[wrapped]
    assert "with duotone.enable" in alone("peft.md", memory)


def test_a_block_that_fails_alone_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        in_a_process("1 / 0", tmp_path)


def test_a_broken_snippet_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text("```python\nx = 1\n```\ntext\n```python\nx.missing\n```\n")
    monkeypatch.setitem(globals(), "DOCS", tmp_path)
    with pytest.raises(AttributeError, match="missing"):
        run("page.md")
