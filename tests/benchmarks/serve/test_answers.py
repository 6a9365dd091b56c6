"""Answers of served and held caches: what is asked, and how sides are compared."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.serve.answers import ASKED, asked, examples_of, held, spec_of
from benchmarks.serve.answers_tables import answers_table
from benchmarks.serve.compared import DENSE, Side, compared, pairs_of
from benchmarks.serve.served_tiny import prompt_of, served_tiny
from duotone.loading import load
from duotone.serve.pages import served_spec
from duotone.serve.plugin import DTYPES
from duotone.tasks import Example

FEW = "duotone_2bit"
SIDES = [Side(x, later, width) for x in (True, False) for later in (0, 1) for width in (DENSE, FEW)]


@pytest.mark.parametrize("bits", DTYPES.values())
def test_pages_and_the_cache_in_memory_have_one_spec(bits: int) -> None:
    spec = spec_of(bits)
    assert (spec.text, spec.visual, spec.sink, spec.recent) == (served_spec(bits), "text", 0, 0)


def test_an_engine_gets_pictures_and_the_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoProcessor

    module = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    seen = []

    def generate(prompts: list, params: SimpleNamespace, use_tqdm: bool) -> list:
        seen.extend(prompts)
        answer = SimpleNamespace(token_ids=(5, 2), text=" 81.66 ")
        assert (params.max_tokens, params.temperature) == (32, 0)
        return [SimpleNamespace(outputs=[answer]) for _ in prompts]

    processor = AutoProcessor.from_pretrained(served_tiny(tmp_path / "tiny"))
    examples = examples_of(["documents"], 2)["documents"]
    found = asked(SimpleNamespace(generate=generate), processor, ASKED["documents"], examples)
    assert found == [([5, 2], "81.66")] * 2
    assert [x["prompt"] for x in seen] == [prompt_of(x.question) for x in examples]
    assert [len(x["multi_modal_data"]["image"]) for x in seen] == [1, 1]


@pytest.mark.parametrize("later", [False, True])
def test_the_model_reads_documents_from_few_bits_in_memory(later: bool) -> None:
    examples = examples_of(["documents"], 2)["documents"]
    loaded = load(device="cpu", dtype=torch.float32)
    found = held(loaded, spec_of(4), ASKED["documents"], examples, 1, later)
    assert [text for _, text in found] == [x.answers[0] for x in examples]


def test_pairs_differ_in_one_thing() -> None:
    pairs = pairs_of(SIDES)
    assert len(pairs) == len({*pairs}) == 8
    assert all(sum(x != y for x, y in zip(a, b, strict=True)) == 1 for a, b in pairs)
    assert all(a.later == b.later for a, b in pairs)


def test_equal_answers_and_tokens_are_counted() -> None:
    examples = [Example(str(n), (), "?", (text,)) for n, text in enumerate(("a b", "c", "d"))]
    right = [([1, 2, 9], "a b"), ([3, 9], "c"), ([4, 9], "d")]
    sides = dict.fromkeys(SIDES, right)
    sides[Side(True, False, FEW)] = [([1, 7, 9], "a x"), ([3, 9], "c"), ([4, 9], "d")]
    row = compared(ASKED["sequences"], examples, sides)
    pairs = {(x["of"], x["to"]): x for x in row["pairs"]}
    for other in ("vLLM, 16 bit", "in memory, duotone_2bit"):
        pair = pairs["vLLM, duotone_2bit", other]
        assert pair["same_answers"] == 2
        assert pair["same_tokens"] == pytest.approx((2 / 3 + 1 + 1) / 3)
        assert pair["difference"]["value"] == pytest.approx(-1 / 3)
        assert pair["difference"]["low"] < pair["difference"]["value"]
    assert pairs["in memory, duotone_2bit", "in memory, 16 bit"]["same_answers"] == 3
    assert row["scores"]["vLLM, 16 bit, question later"]["value"] == 1
    assert row["answers"][0]["vLLM, duotone_2bit"] == "a x"


def test_a_line_stands_for_a_task_and_a_time_of_the_question() -> None:
    examples = [Example(str(n), (), "?", (text,)) for n, text in enumerate("abcd")]
    right = [([n, 9], x.answers[0]) for n, x in enumerate(examples)]
    sides = dict.fromkeys(SIDES, right)
    sides[Side(True, True, FEW)] = [*right[:3], ([7, 9], "x")]
    rows = [compared(ASKED["sequences"], examples, sides)]
    stamp = {"device": "a GPU", "commit": None, "created": "2026-11-27", "versions": {"vllm": "0"}}
    table = answers_table([{**stamp, "dtype": "bfloat16", "row": FEW, "rows": rows}]).splitlines()
    assert table[2] == (
        "| a GPU, bfloat16, duotone_2bit | sequences | with them | accuracy | 1.000 | 1.000 | "
        "+0.000 (+0.000 to +0.000) | 4 of 4 | 4 of 4 | 100.0% |"
    )
    assert "| after the pictures | accuracy | 1.000 | 0.750 | -0.250 (-" in table[3]
    assert table[3].endswith("| 3 of 4 | 3 of 4 | 87.5% |")
    assert table[-1] == "*a GPU; vllm 0; commit no commit; 2026-11-27.*"
