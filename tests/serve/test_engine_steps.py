"""Steps that an engine has on a GPU, in plain torch: answers equal transformers' own.

`make test-vllm`; pages hold K and V as they are, and new ones are full of NaN.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

from engine import answers, engine, install, staggered, tiny_llama  # noqa: E402

install()  # before vLLM looks for platforms

import stress  # noqa: E402
from exact import exact_pages, own, prompts_of, watched  # noqa: E402
from torch_steps import steps_of_a_gpu  # noqa: E402

from duotone.serve.decode import DecodeStep  # noqa: E402

CHUNKS = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("steps") / "llama")


@pytest.fixture
def seen() -> Iterator[Counter]:
    with exact_pages(), steps_of_a_gpu() as counts:
        yield counts


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 40, "block_size": 32},
        {"num_gpu_blocks_override": 64, "additional_config": {"duotone": {"widths": {"1": 4}}}},
        {"num_gpu_blocks_override": 64, "kv_cache_dtype_skip_layers": ["0"]},
    ],
    ids=["alike", "widths", "skipped"],
)
def test_chunks_hits_and_preemption_lose_nothing(
    model: Path, seen: Counter, options: dict[str, Any]
) -> None:
    shared = prompts_of(1, seed=5, least=250, most=260)[0]
    others = prompts_of(8, seed=1, least=1, most=60)
    prompts = [*prompts_of(8), *(shared[: 140 + 11 * i] + p for i, p in enumerate(others))]
    want = own(model, prompts, 40)
    given = {"block_size": None, "max_num_seqs": 6, **CHUNKS, **options}
    with engine(model, "duotone_2bit", **given) as llm:
        counts = watched(llm)
        assert answers(llm, prompts, 40) == want
        assert answers(llm, prompts[::-1], 40) == want[::-1]
    assert counts["hits"] > 100
    assert min(seen[x] for x in ("decode", "chunks", "short", "windows", "mixed")) > 0, seen


def test_random_requests_are_answered(model: Path, seen: Counter) -> None:
    asked = stress.prompts(random.Random(0))[:24]
    want = own(model, asked, stress.NEWEST)
    given = {"num_gpu_blocks_override": 44, "max_num_seqs": 8, **CHUNKS}
    with engine(model, "duotone_2bit", **given) as llm:
        counts = watched(llm)
        found = stress.run(llm, asked, want, 120, time.monotonic() + 60)
    assert found.wrong == []
    assert min(found.answered, counts["preempted"], seen["decode"], seen["mixed"]) > 0


@pytest.mark.parametrize("dtype", ["duotone_2bit", "duotone_4bit"])
def test_rows_beside_first_chunks_and_later_batches_are_as_alone(model: Path, dtype: str) -> None:
    """Pages of few bits: no prompt is cut, and none is a hit, since these read pages."""
    prompts = [*prompts_of(3, seed=11, most=40), *prompts_of(3, seed=12, least=150)]
    options = {"enable_prefix_caching": False, "block_size": None, "max_num_seqs": 6}
    with steps_of_a_gpu() as seen, engine(model, dtype, **options) as llm:
        first = staggered(llm, prompts, 70)
        assert min(seen["decode"], seen["mixed"]) > 0
        assert first == staggered(llm, prompts, 70)
        assert first == [answers(llm, [prompt], 70)[0] for prompt in prompts]


def test_a_wrong_number_is_seen(
    model: Path, seen: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = DecodeStep.fill

    def one_less(step: DecodeStep, *given: Any) -> None:
        fill(step, *given)
        step.numbers.dense.sub_(1)

    monkeypatch.setattr(DecodeStep, "fill", one_less)
    prompts = prompts_of(3)
    with engine(model, "duotone_2bit") as llm:
        assert answers(llm, prompts, 20) != own(model, prompts, 20)
