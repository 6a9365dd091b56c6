"""Tables of steps."""

from benchmarks.serve.tables import steps_table

STAMP = {"device": "a GPU", "versions": {"vllm": "0.33.0", "torch": "2.11.0"}, "compiles": False}


def result(row: str, *rows: tuple[int, int, float]) -> dict:
    numbers = [
        {"batch": batch, "tokens": tokens, "step_ms": ms, "prompts_s": 2.0}
        for batch, tokens, ms in rows
    ]
    return {"row": row, "shape": "llama-8b", "rows": numbers, **STAMP}


RESULTS = [
    result("duotone_2bit", (1, 512, 5.0), (32, 4096, 8.0), (190, 4096, 10.0)),
    result("bf16", (1, 512, 6.0), (32, 4096, 12.0)),
]


def test_rows_stand_beside_16_bit() -> None:
    lines = steps_table(RESULTS).splitlines()
    assert lines[0].startswith("| shape | requests | prompt | bf16, ms a step | duotone_2bit, ms")
    assert lines[3] == (
        "| llama-8b | 32 | 4,096 | 12.00 | 8.00 (1.50 x) | 2,667 | 4,000 | 65,536 | 65,536 |"
    )
    assert lines[4] == "| llama-8b | 190 | 4,096 |  | 10.00 |  | 19,000 |  | 389,120 |"
    assert lines[-1] == "*a GPU, vLLM 0.33.0, torch 2.11.0, without torch.compile.*"


def test_compiled_steps_have_a_table_of_their_own() -> None:
    compiled = [{**one, "compiles": True} for one in RESULTS]
    eager, ours = (steps_table(part).splitlines() for part in (RESULTS, compiled))
    assert steps_table([*RESULTS, *compiled]).splitlines() == [*ours, "", *eager]
    assert ours[-1] == "*a GPU, vLLM 0.33.0, torch 2.11.0, with torch.compile.*"
