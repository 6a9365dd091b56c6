"""Requests held, as they are said at start, against pages that a request takes in the engine.

`make test-vllm`.
"""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

from engine import answers, engine, install, tiny_llama  # noqa: E402

install()  # before vLLM looks for platforms

from exact import prompts_of  # noqa: E402

from duotone.serve import layers  # noqa: E402

LENGTH = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("held") / "llama", layers=5)


def share(model: Path, dtype: str, **options: Any) -> float:
    """Share of the pool that a request of `LENGTH` tokens takes."""
    given = {"block_size": None, "max_model_len": LENGTH, "enable_prefix_caching": False}
    prompt = prompts_of(1, least=LENGTH - 1, most=LENGTH)
    with engine(model, dtype, **given | options) as llm:
        manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        pool, taken, give = manager.block_pool, [], manager.block_pool.get_new_blocks

        def get_new_blocks(count: int) -> Any:
            taken.append(count)
            return give(count)

        pool.get_new_blocks = get_new_blocks
        answers(llm, prompt, 1)
        return sum(taken) / manager.kv_cache_config.num_blocks


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({}, "64"),
        ({"additional_config": {"duotone": {"widths": {"0": 4}}}}, "192 and 320"),
        ({"additional_config": {"duotone": {"widths": {"0": 4, "3": 4}}}}, "192 and 320"),
        ({"kv_cache_dtype_skip_layers": ["1"]}, "704"),
    ],
    ids=lambda x: str(next(iter(x.values()), "")) if isinstance(x, dict) else x,
)
def test_requests_held_are_those_that_the_pool_holds(
    model: Path, options: dict[str, Any], blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(layers.logger, "info_once", lambda form, text: lines.append(text))
    ours = share(model, "duotone_2bit", **options)
    before = share(model, "auto", attention_backend=None, block_size=16)
    (said,) = set(lines)
    found = re.fullmatch(r"duotone: blocks of (.*) tokens; .* bit: ([\d.]+) at 1,024", said)
    assert found[1] == blocks
    assert float(found[2]) == pytest.approx(before / ours, abs=0.06)
