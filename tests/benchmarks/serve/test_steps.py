"""Times of steps, taken of an engine that takes a known time."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from transformers import AutoConfig, AutoTokenizer

from benchmarks.serve import steps
from benchmarks.serve.model import save_words
from duotone.bench.serve import ROWS


class Engine:
    """Reads one prompt per step of a second, and then says a token of each request per step."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 100)

    def __init__(self) -> None:
        self.clock, self.said, self.waiting = 0.0, {}, []

    def add_request(self, name: str, prompt: dict, params: SimpleNamespace) -> None:
        assert all(3 <= id < 99 for id in prompt["prompt_token_ids"])
        self.waiting.append(name)
        self.most = params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting) or any(len(x) < self.most for x in self.said.values())

    def step(self) -> list[SimpleNamespace]:
        self.clock += 1.0 if self.waiting else 0.25
        if self.waiting:
            self.said[self.waiting.pop(0)] = []
        going = {name: ids for name, ids in self.said.items() if len(ids) < self.most}
        for ids in going.values():
            ids.append(len(ids))
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=ids)])
            for name, ids in going.items()
        ]


@pytest.mark.parametrize("batch", [1, 3])
def test_steps_are_those_in_which_all_requests_decode(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    engine = Engine()
    monkeypatch.setattr(steps.time, "perf_counter", lambda: engine.clock)
    found = steps.decode(engine, batch, 7, seed=1)
    assert found["prompts_s"] == batch
    assert found["step_ms"] == pytest.approx(250)
    assert found["step_p50_ms"] == 250
    assert found["answer"] == list(range(8))


def test_a_hybrid_config_is_saved_with_its_name(tmp_path: Path) -> None:
    steps.save_config(steps.HYBRID, tmp_path, 4096)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["Qwen3_5ForCausalLM"]
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (32, 4096, 256)
    assert config.layer_types.count("full_attention") == 8


def test_an_engine_has_the_options_of_a_server() -> None:
    assert steps.options_of("duotone_2bit") == {
        "kv_cache_dtype": "duotone_2bit",
        "attention_backend": "CUSTOM",
    }
    for row in ROWS:
        assert steps.options_of(row)["kv_cache_dtype"] in (row, "auto")


def test_every_word_is_one_token(tmp_path: Path) -> None:
    save_words(40, tmp_path)
    steps.save_config("tiny", tmp_path, 64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = [39, 3, 3, 17]
    assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids
