"""vLLM with the plug-in, on a CPU: what it says, through hits, chunks, preemption, and reuse.

`exact` pages hold K and V as they are, so tokens must equal transformers' own, whatever the engine
does with pages. Runs in `make test-vllm`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

from engine import answers, changed, engine, install, tiny_gemma, tiny_llama  # noqa: E402

install()  # before vLLM looks for platforms

from exact import exact_pages, own, prompts_of, watched  # noqa: E402

import duotone  # noqa: E402

BITS = {"duotone_2bit": 2, "duotone_4bit": 4}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("engine")
    return {d: tiny_llama(folder / f"llama{d}", d) for d in (64, 128)}


@pytest.fixture
def exact() -> Iterator[None]:
    with exact_pages():
        yield


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


def test_weights_that_are_loaded_anew_leave_pages_and_rings(
    models: dict[int, Path], exact: None
) -> None:
    prompts = prompts_of(3)
    with engine(models[64], "duotone_2bit") as llm:
        before = answers(llm, prompts, 40)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        layers = worker.model_runner.compilation_config.static_forward_context
        held = dict(layers)
        for layer in held.values():
            if hasattr(layer, "impl"):  # as vLLM's `reload_weights` does
                layer.process_weights_after_loading(torch.float32)
        assert [*layers.items()] == [*held.items()]
        assert answers(llm, prompts[::-1], 40) == before[::-1]


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
    [
        ({"9": 4}, "layers 0 to 2"),
        ({"0": 3}, r"\[2, 4\] bits"),
        ({"x": 4}, "layers 0 to 2"),
        ({"0": 4.0}, r"\[2, 4\] bits"),
        ([4, 4], "bits by numbers of layers"),
    ],
    ids=str,
)
def test_widths_of_no_layer_or_no_kernel_are_refused(
    models: dict[int, Path], widths: Any, reason: str
) -> None:
    options = {"additional_config": {"duotone": {"widths": widths}}, "block_size": None}
    with pytest.raises(Exception, match=reason), engine(models[64], "duotone_2bit", **options):
        pass


def test_windows_are_skipped_by_name(models: dict[int, Path], tmp_path: Path, exact: None) -> None:
    window = tiny_gemma(tmp_path / "gemma")
    prompts = prompts_of(6)
    options = {"kv_cache_dtype_skip_layers": ["sliding_window"], "block_size": None}
    with engine(window, "duotone_2bit", **options) as llm:
        found = [answers(llm, prompts, 60), answers(llm, prompts, 60)]
    assert found == [own(window, prompts, 60)] * 2
