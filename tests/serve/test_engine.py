"""vLLM with the plug-in, on a CPU: what it says, through hits, chunks, preemption, and reuse.

`exact` pages hold K and V as they are, so tokens must equal transformers' own, whatever the engine
does with pages. Runs in `make test-vllm`.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

from engine import answers, changed, engine, install, tiny_gemma, tiny_llama  # noqa: E402

install()  # before vLLM looks for platforms

import duotone  # noqa: E402
from duotone.serve import backend, pages  # noqa: E402

BITS = {"duotone_2bit": 2, "duotone_4bit": 4}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("engine")
    return {d: tiny_llama(folder / f"llama{d}", d) for d in (64, 128)}


class ExactLayout(pages.PageLayout):
    """Pages of K and V as they are; with 4 bits, half as much again that nobody reads."""

    token_bytes = property(lambda self: (2 + self.bits // 4) * self.head_dim * self.dtype.itemsize)
    tokens = property(lambda self: 32)
    nbytes = property(lambda self: self.tokens * self.token_bytes)


def read_exact(layout: Any, pool: torch.Tensor, numbers: torch.Tensor) -> Any:
    rows = layout.records(pool)[numbers.long()].view(layout.dtype)
    both = rows.unflatten(2, (layout.tokens, -1, layout.head_dim)).transpose(1, 2).flatten(0, 1)
    return both[:, :, 0], both[:, :, 1]


def write_exact(
    layout: Any, pool: torch.Tensor, numbers: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    parts = [key, value, key.new_full(key.shape, torch.nan)][: 2 + layout.bits // 4]
    both = torch.stack(parts, 2).unflatten(0, (-1, layout.tokens)).transpose(1, 2)
    layout.records(pool)[numbers.long()] = both.flatten(2).contiguous().view(torch.uint8)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Exact pages; new ones are full of NaN, as one that another request has left could be."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    backend.backend_of.cache_clear()
    monkeypatch.setattr(backend, "PageLayout", ExactLayout)
    monkeypatch.setattr(pages, "read_pages", read_exact)
    monkeypatch.setattr(pages, "write_pages", write_exact)
    fresh: list[int] = []
    given, run = BlockPool.get_new_blocks, GPUModelRunner._model_forward

    def get_new_blocks(self: Any, count: int) -> Any:
        found = given(self, count)
        fresh.extend(block.block_id for block in found)
        return found

    def model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if fresh:
            for kept in self.compilation_config.static_forward_context.values():
                pool = getattr(kept, "kv_cache", None)
                if isinstance(pool, torch.Tensor) and pool.numel():
                    blocks = pool.unflatten(0, (self.kv_cache_config.num_blocks, -1))
                    blocks[torch.tensor(fresh)] = 255 if pool.dtype == torch.uint8 else torch.nan
            fresh.clear()
        return run(self, *args, **kwargs)

    monkeypatch.setattr(BlockPool, "get_new_blocks", get_new_blocks)
    monkeypatch.setattr(GPUModelRunner, "_model_forward", model_forward)
    yield
    backend.backend_of.cache_clear()


def prompts_of(count: int, seed: int = 0, least: int = 3, most: int = 200) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(3, 320) for _ in range(draw.randrange(least, most))] for _ in range(count)
    ]


def own(model: Path, prompts: list[list[int]], new: int, spec: Any = None) -> list[list[int]]:
    """Tokens of transformers, on its own cache or on a `QuantizedCache`."""
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def said(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        found = llama.generate(
            ids, attention_mask=mask, do_sample=False, eos_token_id=None, **options
        )
        return found[0, len(prompt) :].tolist()

    if spec is None:
        return [said(p) for p in prompts]
    with duotone.enable(llama, spec):
        return [said(p) for p in prompts]


@pytest.mark.parametrize(("dtype", "head_dim"), [("duotone_4bit", 64), ("duotone_2bit", 128)])
def test_tokens_equal_those_of_the_cache_in_memory(
    models: dict[int, Path], dtype: str, head_dim: int
) -> None:
    prompts = prompts_of(6)
    spec = duotone.scheme("duotone-stream", bits=BITS[dtype]).replace(sink=0, recent=0)
    with engine(models[head_dim], dtype) as llm:
        found = answers(llm, prompts, 48)
    assert found == own(models[head_dim], prompts, 48, spec)


def test_chunks_hits_and_preemption_lose_nothing(models: dict[int, Path], exact: None) -> None:
    shared = prompts_of(1, seed=5, least=150, most=160)[0]
    others = prompts_of(8, seed=1, least=1, most=60)
    prompts = [*prompts_of(8), *(shared[: 40 + 11 * i] + p for i, p in enumerate(others))]
    want = own(models[64], prompts, 40)
    options = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True, "max_num_seqs": 6}
    with engine(models[64], "duotone_4bit", num_gpu_blocks_override=40, **options) as llm:
        seen = watched(llm)
        assert answers(llm, prompts, 40) == want
        assert answers(llm, prompts[::-1], 40) == want[::-1]
    assert seen["hits"] > 100


def test_preempted_requests_go_on_as_if_nothing_had_been(
    models: dict[int, Path], exact: None
) -> None:
    prompts = prompts_of(9, seed=2, most=40)
    # Six requests of two or three blocks grow to seven or eight of 24.
    with engine(models[64], "duotone_4bit", num_gpu_blocks_override=24, max_num_seqs=6) as llm:
        seen = watched(llm)
        found = answers(llm, prompts, 150)
    assert seen["preempted"] > 3
    assert found == own(models[64], prompts, 150)


def watched(llm: Any) -> dict[str, int]:
    """Tokens of prefix hits and preempted requests of an engine, as they come."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager, seen = scheduler.kv_cache_manager, {"hits": 0, "preempted": 0}
    hits, preempt = manager.get_computed_blocks, scheduler._preempt_request

    def get_computed_blocks(*args: Any, **kwargs: Any) -> Any:
        found = hits(*args, **kwargs)
        seen["hits"] += found[1]
        return found

    def preempt_request(*args: Any, **kwargs: Any) -> Any:
        seen["preempted"] += 1
        return preempt(*args, **kwargs)

    manager.get_computed_blocks, scheduler._preempt_request = get_computed_blocks, preempt_request
    return seen


def test_two_answers_of_a_prompt_are_as_one(models: dict[int, Path], exact: None) -> None:
    prompts = prompts_of(3, seed=7)
    with engine(models[64], "duotone_4bit") as llm:
        # Two answers are drawn, each from one token.
        twice = answers(llm, prompts, 40, n=2, temperature=1.0, top_k=1)
    assert twice[::2] == twice[1::2] == own(models[64], prompts, 40)


def test_requests_of_one_step_share_pages_that_it_writes(
    models: dict[int, Path], exact: None
) -> None:
    # The second is left with one token, whose row comes before the first one's.
    prompt = prompts_of(1, seed=9, least=129, most=130)[0]
    with engine(models[64], "duotone_4bit") as llm:
        seen = watched(llm)
        assert answers(llm, [prompt] * 3, 40) == own(models[64], [prompt] * 3, 40)
    assert seen["hits"] == 2 * 128


def test_all_blocks_come_back(models: dict[int, Path]) -> None:
    with engine(models[64], "duotone_4bit") as llm:
        manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        before = manager.block_pool.get_num_free_blocks()
        answers(llm, prompts_of(9), 40)
        assert manager.block_pool.get_num_free_blocks() == before


def test_a_sliding_window_is_refused_at_start(models: dict[int, Path], tmp_path: Path) -> None:
    fields = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 64,
    }
    with (
        pytest.raises(Exception, match="sliding"),
        engine(changed(models[64], tmp_path / "window", **fields), "duotone_4bit"),
    ):
        pass


def test_drafts_are_refused_at_start(models: dict[int, Path]) -> None:
    drafts = {"model": str(models[64]), "num_speculative_tokens": 2}
    with (
        pytest.raises(Exception, match="without drafts"),
        engine(models[64], "duotone_4bit", speculative_config=drafts),
    ):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype_skip_layers": ["1"]},
        {"kv_cache_dtype_skip_layers": ["0", "2"]},
        {"additional_config": {"duotone": {"widths": {"0": 4}}}},
        {"additional_config": {"duotone": {"widths": {"1": 4, "2": 4}}}},
    ],
    ids=lambda x: str(next(iter(x.values()))),
)
def test_layers_of_several_widths_lose_nothing(
    models: dict[int, Path], exact: None, options: dict[str, Any]
) -> None:
    # Prompts of several of the longer blocks, which hits must share.
    shared = prompts_of(1, seed=5, least=300, most=301)[0]
    prompts = [*prompts_of(6), *(shared + p for p in prompts_of(6, seed=3, most=60))]
    given = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True, "block_size": None}
    with engine(
        models[64], "duotone_2bit", num_gpu_blocks_override=64, max_num_seqs=6, **given, **options
    ) as llm:
        seen = watched(llm)
        found = [answers(llm, prompts, 60), answers(llm, prompts[::-1], 60)[::-1]]
    assert found == [own(models[64], prompts, 60)] * 2
    assert seen["hits"] > 100


def test_skipped_layers_keep_16_bit_and_the_others_theirs(models: dict[int, Path]) -> None:
    # Tokens of the others are in rings as they are, so far.
    prompts = prompts_of(4, most=20)
    with engine(
        models[128], "duotone_2bit", kv_cache_dtype_skip_layers=["1"], block_size=None
    ) as llm:
        found = answers(llm, prompts, 10)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        layers = worker.model_runner.compilation_config.static_forward_context
        kinds = {type(x.impl).__name__ for n, x in layers.items() if n.endswith("1.self_attn.attn")}
        dtypes = [x.kv_cache.dtype for n, x in layers.items() if n.endswith("self_attn.attn")]
    assert found == own(models[128], prompts, 10)
    assert kinds == {"PlainAttention"}
    assert dtypes == [torch.uint8, torch.float32, torch.uint8]


@pytest.mark.parametrize(
    ("widths", "reason"),
    [({"9": 4}, "layers 0 to 2"), ({"0": 3}, r"\[2, 4\] bits"), ({"x": 4}, "layers 0 to 2")],
)
def test_widths_of_no_layer_or_no_kernel_are_refused(
    models: dict[int, Path], widths: dict[str, int], reason: str
) -> None:
    options = {"additional_config": {"duotone": {"widths": widths}}}
    with pytest.raises(Exception, match=reason), engine(models[64], "duotone_2bit", **options):
        pass


def test_windows_are_skipped_by_name(models: dict[int, Path], tmp_path: Path, exact: None) -> None:
    window = tiny_gemma(tmp_path / "gemma")
    prompts = prompts_of(6)
    options = {"kv_cache_dtype_skip_layers": ["sliding_window"], "block_size": None}
    with engine(window, "duotone_2bit", **options) as llm:
        found = [answers(llm, prompts, 60), answers(llm, prompts, 60)]
    assert found == [own(window, prompts, 60)] * 2
