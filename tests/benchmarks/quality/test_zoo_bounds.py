"""Ratios of the zoo's rows against their bounds."""

from typing import Any

import pytest

from benchmarks.quality.zoo_bounds import RENDERERS, bounds_table, calibrated_table, rows_table


def result(model: str, created: str = "2026-11-28", **kl: float) -> dict[str, Any]:
    names = {"ours": "duotone@1", "lloyd": "lloyd, one gain@1", "paper": "calibquant-paper@1"}
    rows = [{"row": names.get(k, k), "kl": x, "kl_sums": [0.9 * x, 1.1 * x]} for k, x in kl.items()]
    header = {"schema": "duotone.zoo/1", "stress": "none", "versions": {}, "device": "cpu"}
    plain = {"row": "16 bit", "tokens": [1, 1]}
    return header | {"model": model, "created": created, "commit": "c", "rows": [plain, *rows]}


def test_ratios_are_of_the_newest_files_and_the_nearer_row() -> None:
    given = {"lloyd": 1.0, "paper": 4.0, "calibquant@1": 8.0}
    files = [
        result("a", ours=0.2, **given),
        result("b", ours=1.0, **given),
        result("b", "2026-11-27", ours=100.0, **given),
    ]
    table = bounds_table(files)
    assert "| duotone@1 | lloyd, one gain@1 | 0.45 | 1 | b | 0.5 | 1 of 2 | 0 |" in table
    pair = "calibquant@1 or calibquant-paper@1"
    assert f"| duotone@1 | {pair} | 0.11 | 0.25 | b | 0.1 | 1 of 2 | 0 |" in table
    assert "min/max@2" not in table


@pytest.mark.parametrize(("ours", "beyond"), [(1.1, 0), (9.0, 1)])
def test_rows_beyond_the_interval_are_counted(ours: float, beyond: int) -> None:
    rows = [{"row": "16 bit", "tokens": [1, 1]}]
    rows.append({"row": "duotone@1", "kl": ours, "kl_sums": [0.9 * ours, 1.1 * ours]})
    rows.append({"row": "lloyd, one gain@1", "kl": 1.0, "kl_sums": [1.5, 0.5]})
    table = bounds_table([result("a") | {"stress": "keys x8", "rows": rows}])
    assert f"| {ours:g} | a, keys x8 | 0.5 | 0 of 1 | {beyond} |" in table


def test_calibrations_stand_beside_presets_by_model() -> None:
    one = result("a", ours=0.5)
    one["rows"][1] |= {"kl_interval": 0.25, "visual_bits": 1.5}
    table = calibrated_table([one, result("b", ours=1.0) | {"stress": "keys x8"}])
    assert "| a |  | 0.5 ± 0.2 (1.50) |  |  |  |  |" in table
    assert "| b |" not in table


def test_models_that_nothing_was_chosen_on_have_tables_of_their_own() -> None:
    files = [
        result("llava", ours=0.25, lloyd=1.0),
        result("glm4v", ours=0.5, lloyd=1.0),
    ]
    zoo, unseen = (RENDERERS[f"{name}-bounds"][1](files) for name in ("zoo", "unseen"))
    assert "| 0.25 | 0.25 | llava |" in zoo
    assert "| 0.5 | 0.5 | glm4v |" in unseen
    assert "glm4v" not in zoo
    assert "llava" not in unseen


def test_rows_of_all_models_stand_by_their_bits() -> None:
    one, other = result("a", ours=0.5, lloyd=1.0), result("b", paper=2.0)
    for file, bits in ((one, (1.5, 1.25)), (other, (1.75,))):
        for row, held in zip(file["rows"][1:], bits, strict=True):
            row |= {"kl_interval": 0.25, "visual_bits": held}
    one["sequences"] = other["sequences"] = 2
    one["rows"].append({"row": "commvq@1", "failed": "why"})
    lines = rows_table([one, other]).splitlines()
    assert lines[2] == "| lloyd, one gain@1 | 1 ± 0.2 (1.25) |  |"
    assert lines[3] == "| duotone@1 | 0.5 ± 0.2 (1.50) |  |"
    assert lines[4] == "| calibquant-paper@1 |  | 2 ± 0.2 (1.75) |"
    assert "over 2 sequences" in rows_table([one, other])
