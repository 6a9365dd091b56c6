"""Tables of conversations: made-up sums, and bytes by the planner."""

import pytest

from benchmarks.quality import conversation_bytes, conversation_tables
from benchmarks.quality.conversation import KIVI, ONE_BIT, OURS

HEADER = {"created": "2026-11-27T00:00:00+00:00", "commit": None, "versions": {}, "device": "CPU"}
TOKENS = [2, 2]


def _row(name: str, sums: list[float]) -> dict:
    row: dict = {"row": name, "accuracy": 0.5, "bytes": 30, "bytes_mean": 10}
    for part in conversation_tables.PARTS:
        row |= {part: sum(sums) / 4, f"{part}_interval": 0.1, f"{part}_sums": sums}
    return row


def _result(*rows: dict) -> dict:
    tokens = {f"tokens{part[2:]}": TOKENS for part in conversation_tables.PARTS}
    sizes = {"16 bit": {"bytes": 100, "bytes_mean": 50}}
    sizes["kivi@2, published"] = {"bytes": 60, "bytes_mean": 40}
    plain = {"row": "16 bit", "accuracy": 0.75, **tokens}
    result = {**HEADER, "model": "a", "conversations": 2, "length": 9, "visual_tokens": 4}
    return result | {"parts": 1, "sizes": sizes, "rows": [plain, *rows]}


def test_pairs_of_conversations_decide_what_is_bold() -> None:
    """One conversation that is worse by chance alone is no loss; all of them are one."""
    kivi, lucky = _row(KIVI, [1.0, 2.0]), _row("as good", [2.0, 1.2])
    worse = _row("worse", [1.5, 2.5])
    table = conversation_tables.talk_table(
        [_result(kivi, lucky, worse, {"row": "x", "failed": "y"})]
    )
    assert "| as good | **0.8 ± 0.1** |" in table
    assert "| worse | 1 ± 0.1 | 1 ± 0.1 | 1 ± 0.1 | 0.500 | 0.50 | 0.25 |" in table
    assert "| 16 bit |  |  |  | 0.750 | 1.67 | 1.25 |" in table
    assert "| x |" not in table
    mean, half = conversation_tables.difference(worse, kivi, "kl", TOKENS)
    assert (mean, half) == (0.25, 0.0)


def test_bytes_come_to_half_where_pictures_are_most_tokens() -> None:
    few, many = (conversation_bytes.compared(*talk) for talk in ((576, 1, 1024), (3328, 1, 64)))
    one_bit, less_text = f"{OURS}, {ONE_BIT}", f"duotone-mixed@2, {ONE_BIT}"
    assert few["bytes"][OURS] > few["bytes"][one_bit] > 0.8 * few["kivi_bytes"]
    assert many["bytes"][one_bit] < many["bytes"][less_text] < 0.5 * many["kivi_bytes"]
    assert 0.5 * many["kivi_bytes"] < many["bytes"][OURS] < 0.75 * many["kivi_bytes"]
    assert few["kivi_bytes"] == pytest.approx(conversation_bytes.kivi_bytes(1600))
    result = {**HEADER, "shape": "toy", "talks": [many]}
    assert "| 3,328 | 1 | 64 | 0.42 |" in conversation_tables.bytes_table([result])
