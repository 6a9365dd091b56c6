"""Features of vLLM's engine on the plug-in's pages: cancellation, mixes, LoRA, random requests.

`make test-vllm`; pages hold K and V as they are, so answers must equal transformers' own.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

from engine import answers, engine, install, staggered, tiny_llama, tiny_lora  # noqa: E402

install()  # before vLLM looks for platforms

import stress  # noqa: E402
from exact import exact_pages, own, prompts_of, watched  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("features") / "llama")


@pytest.fixture
def exact() -> Iterator[None]:
    with exact_pages():
        yield


def test_random_requests_are_answered_and_leave_nothing(model: Path, exact: None) -> None:
    asked = stress.prompts(random.Random(0))[:24]
    want = own(model, asked, stress.NEWEST)
    options = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True, "max_num_seqs": 8}
    with engine(model, "duotone_2bit", num_gpu_blocks_override=44, **options) as llm:
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        before, counts = pool.get_num_free_blocks(), watched(llm)
        seen = stress.run(llm, asked, want, 120, time.monotonic() + 60)
        assert pool.get_num_free_blocks() == before
    assert seen.wrong == []
    assert seen.answered + seen.cancelled == 120
    assert min(seen.cancelled, *(counts[x] for x in ("hits", "preempted", "evicted"))) > 0
    assert counts["free"] == 0


def test_copied_text_is_right_in_a_full_pool_guided_or_not(tmp_path: Path) -> None:
    """Fields of documents in 4 bits, two questions a picture: hits, and pages that others left."""
    command = [sys.executable, Path(__file__).parent / "full_pool.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for texts in found["texts"]:
        assert all(x in y for x, y in zip(texts, found["wanted"], strict=True)), texts
    counts = found["counts"]
    assert min(counts["hits"], counts["evicted"]) > 0, counts
    assert counts["free"] == 0, counts


def test_a_wrong_answer_is_seen(model: Path) -> None:
    # Without exact pages some answers differ: the check of random requests can fail.
    asked = stress.prompts(random.Random(0))[:4]
    want = own(model, asked, stress.NEWEST)
    with engine(model, "duotone_2bit", block_size=None) as llm:
        assert stress.run(llm, asked, want, 30, time.monotonic() + 30).wrong


def test_first_chunks_beside_short_continuations_equal_each_alone(model: Path, exact: None) -> None:
    # Short ones have some tokens by the time a long one comes.
    prompts = [*prompts_of(3, seed=11, most=40), *prompts_of(3, seed=12, least=150)]
    options = {"max_num_batched_tokens": 72, "enable_chunked_prefill": True, "max_num_seqs": 6}
    with engine(model, "duotone_4bit", **options) as llm:
        assert staggered(llm, prompts, 30) == own(model, prompts, 30)


def test_the_first_batch_equals_the_second(model: Path) -> None:
    # Without hits: these read pages, where a prompt of its own reads K and V as they are.
    with engine(model, "duotone_2bit", enable_prefix_caching=False, block_size=None) as llm:
        prompts = prompts_of(6)
        assert answers(llm, prompts, 40) == answers(llm, prompts, 40)


@pytest.mark.parametrize("length", [32, 64, 96, 45])
def test_a_prompt_that_is_a_hit_as_a_whole_goes_on(model: Path, exact: None, length: int) -> None:
    prompt = prompts_of(1, seed=length, least=length, most=length + 1)
    with engine(model, "duotone_4bit") as llm:
        seen = watched(llm)
        assert [answers(llm, prompt, 40) for _ in range(2)] == [own(model, prompt, 40)] * 2
        # The last token of a prompt is never a hit, so neither is a page that it fills.
        assert seen["hits"] == (length - 1) // 32 * 32


def test_lora_changes_its_own_requests_alone(model: Path, exact: None, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    prompts = prompts_of(3)
    adapter, merged = tiny_lora(model, tmp_path)
    with engine(model, "duotone_4bit", enable_lora=True, max_lora_rank=8) as llm:
        plain = answers(llm, prompts, 30)
        lora = LoRARequest("tuned", 1, str(adapter))
        tuned = answers(llm, prompts, 30, lora=lora)
        assert answers(llm, prompts * 2, 30, lora=[None, None, None, lora, lora, lora]) == [
            *plain,
            *tuned,
        ]
    assert plain == own(model, prompts, 30)
    assert tuned == own(merged, prompts, 30) != plain
