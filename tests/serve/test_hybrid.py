"""Qwen 3.5 in vLLM's engine: linear layers keep vLLM's states next to the plug-in's pages.

`make test-vllm`, where torchvision lets vLLM load its Qwen 3.5. Prefix caching is refused for it
(`test_refusals`).
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("torchvision")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

from engine import answers, engine, install, tiny_hybrid  # noqa: E402

install()  # before vLLM looks for platforms

import plain_states  # noqa: E402
from exact import exact_pages, own, prompts_of, watched  # noqa: E402

from duotone.serve import layers  # noqa: E402

plain_states.install()
OPTIONS: dict[str, Any] = {"block_size": None, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "qwen")


def test_states_and_pages_answer_as_transformers(hybrid: Path) -> None:
    prompts = prompts_of(9)
    sizes = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 40, "max_num_seqs": 6}
    with exact_pages(), engine(hybrid, "duotone_2bit", **OPTIONS, **sizes) as llm:
        seen = watched(llm)
        assert answers(llm, prompts, 60) == own(hybrid, prompts, 60)
    assert seen["preempted"] > 0


def test_blocks_that_cover_a_state_give_rings_several_pages(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(layers.logger, "info_once", lambda form, text: lines.append(text))
    # Tokens of pages that are not full are as they are.
    prompts = prompts_of(4, most=16)
    with engine(hybrid, "duotone_2bit", **OPTIONS) as llm:
        manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        groups = manager.kv_cache_config.kv_cache_groups
        assert answers(llm, prompts, 14) == own(hybrid, prompts, 14)
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    assert kinds.count("MambaSpec") == 3
    assert kinds.count("CircularBufferSpec") < 12  # as many as a model without states needs
    assert "blocks of 128 tokens" in lines[0]
    assert "times 16 bit" in lines[0]
