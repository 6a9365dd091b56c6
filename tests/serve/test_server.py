"""`vllm serve` as docs/serving.md starts it, on a CPU, asked by the OpenAI client with a picture.

Runs in `make test-vllm`.
"""

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

from engine import install  # noqa: E402

install()  # before vLLM looks for platforms

from benchmarks.serve.served_tiny import served_tiny  # noqa: E402
from duotone.models import duotone_tiny_path, example_picture  # noqa: E402

START_S, STOP_S = 180, 30
DOCUMENTED = ["--kv-cache-dtype", "duotone_2bit", "--attention-backend", "CUSTOM"]
# The embedded model by transformers' own modules (vLLM's Qwen 2 has no head_dim), and what a build
# without kernels needs.
HERE = ["--model-impl", "transformers", "--dtype", "float32", "--enforce-eager"]
HERE += ["--compilation-config", '{"custom_ops": ["none"]}', "--max-num-seqs", "8"]
HERE += ["--max-model-len", "2048"]
QUESTION = "Describe the picture."


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "vllm"), "serve"]
    command += [str(served_tiny(folder / "duotone-tiny")), *DOCUMENTED, *HERE]
    log = folder / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            [*command, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        end = time.monotonic() + START_S
        while not answers_at(port):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.2)
        yield port
        server.send_signal(signal.SIGTERM)
        assert server.wait(STOP_S) is not None
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)


def answers_at(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
    except OSError:
        return False
    return True


@pytest.fixture
def client(port: int) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as found:
        yield found


def ask(client: Any, **options: Any) -> Any:
    url = "data:image/png;base64," + base64.b64encode(example_picture().read_bytes()).decode()
    picture = {"type": "image_url", "image_url": {"url": url}}
    content = [picture, {"type": "text", "text": QUESTION}]
    given = {"model": "tiny", "temperature": 0, "max_tokens": 48}
    return client.chat.completions.create(
        messages=[{"role": "user", "content": content}], **given | options
    )


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as found:
        text = found.read().decode()
    return sum(float(x) for x in re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


def own() -> str:
    """The answer of transformers on its own cache."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(duotone_tiny_path())
    model = AutoModelForImageTextToText.from_pretrained(duotone_tiny_path(), dtype=torch.float32)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    given = processor(text=text, images=[Image.open(example_picture())], return_tensors="pt")
    found = model.eval().generate(**given, max_new_tokens=48, do_sample=False)
    said = found[0, given["input_ids"].shape[1] :]
    return processor.tokenizer.decode(said, skip_special_tokens=True)


def test_a_picture_is_described_as_in_16_bit(client: Any) -> None:
    answer = ask(client).choices[0].message.content
    print(answer)
    assert "house" in answer
    assert answer == own()


def test_a_picture_that_was_seen_is_a_prefix_hit(client: Any, port: int) -> None:
    first = ask(client).choices[0].message.content
    before = metric(port, "prefix_cache_hits_total")
    assert ask(client).choices[0].message.content == first
    assert metric(port, "prefix_cache_hits_total") - before == 256  # 4 pages of 64 tokens


def test_two_answers_and_a_stream_are_as_one(client: Any) -> None:
    one = ask(client).choices[0].message.content
    twice = ask(client, n=2, temperature=1.0, extra_body={"top_k": 1})
    assert [x.message.content for x in twice.choices] == [one, one]
    parts = [x.choices[0].delta.content or "" for x in ask(client, stream=True) if x.choices]
    assert "".join(parts) == one


def test_guided_answers_keep_to_the_choices(client: Any) -> None:
    choices = ["A green sea", "A beige plain"]
    guide = {"structured_outputs": {"choice": choices}}
    assert ask(client, extra_body=guide).choices[0].message.content in choices


def test_a_request_that_is_left_gives_its_blocks_back(client: Any, port: int) -> None:
    stream = ask(client, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert metric(port, "num_requests_running") == 1
    stream.close()
    end = time.monotonic() + STOP_S
    while metric(port, "num_requests_running") or metric(port, "kv_cache_usage_perc"):
        assert time.monotonic() < end
        time.sleep(0.1)
