"""The choice by who beats a candidate, then by typical loss, on made-up sums of three models."""

import json
from dataclasses import replace

import pytest

from benchmarks.quality import choose, zoo_tables
from benchmarks.quality.bounds import CHANNELS, LAYERS, within_bounds
from benchmarks.quality.candidates import CANDIDATES
from benchmarks.quality.choose import Case
from benchmarks.quality.zoo import candidates
from duotone import CacheSpec, KVSpec, LayerRule, TensorSpec, scheme
from duotone.quant.accounting import span_bits

from paths import REPOSITORY

BOLD, SAFE = "parts, bold@1", "parts, safe@1"
PLAIN, OTHER = "min/max@1", "lloyd, one gain@1"


def _case(model: str, stress: str = "none", **sums: list[float]) -> Case:
    tokens = [2, 2]
    rows = {
        name: {"row": name, "kl": sum(x) / 4, "kl_interval": 0.0, "kl_sums": x, "visual_bits": 1.5}
        for name, x in sums.items()
    }
    return Case(model, stress, tokens, rows)


def _cases() -> list[Case]:
    """BOLD is better on a and b, and three times worse than plain codes on c."""
    plain = {PLAIN: [4.0, 4.0], OTHER: [9.0, 9.0]}
    good = {BOLD: [0.4, 0.4], SAFE: [2.0, 2.0]}
    return [
        _case("a", **plain, **good),
        _case("a", "keys x8", **plain, **good),
        _case("b", **plain, **good),
        _case("c", **plain, **{BOLD: [12.0, 12.0], SAFE: [2.0, 2.0]}),
    ]


def test_a_case_that_others_win_decides() -> None:
    cases, rows = _cases(), [BOLD, SAFE]
    assert choose.worst(cases, BOLD, 1) == pytest.approx(3)
    assert choose.worst(cases, SAFE, 1) == pytest.approx(0.5)
    assert choose.choose(cases, rows, 1) == SAFE


def test_of_equals_the_geometric_mean_decides_not_the_worst_case() -> None:
    plain = {PLAIN: [4.0, 4.0], OTHER: [9.0, 9.0]}
    losses = {"a": (0.2, 1.6), "b": (0.2, 1.6), "c": (2.0, 1.6)}
    cases = [_case(m, **plain, **{BOLD: [b, b], SAFE: [s, s]}) for m, (b, s) in losses.items()]
    assert choose.worst(cases, BOLD, 1) > choose.worst(cases, SAFE, 1)
    assert choose.typical(cases, BOLD, 1) == pytest.approx((0.05**2 * 0.5) ** (1 / 3))
    assert choose.choose(cases, [SAFE, BOLD], 1) == BOLD


def test_a_model_is_scored_by_a_choice_that_did_not_see_it() -> None:
    cases, rows = _cases(), [BOLD, SAFE]
    assert choose.held_out(cases, rows, 1) == {"a": SAFE, "b": SAFE, "c": BOLD}
    found = choose.report(cases, rows, 1)
    assert found["preset"] == SAFE
    of_c = found["cases"][-1]
    assert {row["row"]: row["kl"] for row in of_c["rows"]}["held-out choice"] == 6
    assert of_c["beaten_by"] == [PLAIN, OTHER]


def test_pairs_of_sequences_decide_what_is_worse() -> None:
    """Sums that differ by one sequence alone are no difference."""
    case = _case("a", **{SAFE: [1.0, 9.0], PLAIN: [1.0, 3.0], OTHER: [0.0, 8.0]})
    mean, half = case.difference(SAFE, PLAIN)
    assert (mean, half > mean) == (1.5, True)
    mean, half = case.difference(SAFE, OTHER)
    assert (mean, half) == (0.5, 0)
    other = _case("b", **{name: row["kl_sums"] for name, row in case.rows.items()})
    scored = choose.report([case, other], [SAFE], 1)["cases"][0]
    assert scored["beaten_by"] == [OTHER]
    as_least = {row["row"]: row["as_the_least"] for row in scored["rows"]}
    assert as_least == {"held-out choice": True, PLAIN: True, OTHER: True}


def test_our_calibrations_beat_no_candidate() -> None:
    case = _case("a", **{SAFE: [5.0, 9.0], PLAIN: [9.0, 9.0], "calibrated@1": [1.0, 1.0]})
    assert choose.beaten_by(case, SAFE, 1) == []
    assert "calibrated@1" in {row["row"] for row in choose._scored(case, SAFE, 1)["rows"]}
    other = _case("b", **{SAFE: [5.0, 9.0], PLAIN: [9.0, 9.0], OTHER: [1.0, 1.0]})
    assert choose.beaten_by(other, SAFE, 1) == [OTHER]


def test_no_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="got 4, 0"):
        choose.choose(_cases(), [], 1)


@pytest.fixture
def result() -> dict:
    """A file of choose.py from files of two commits and devices."""
    header = {"created": "2026-11-27T00:00:00", "versions": {"torch": "2"}}
    sources = [
        {**header, "created": "2026-11-26T00:00:00", "commit": "b" * 40, "device": "a card"},
        {**header, "commit": "c" * 40, "device": "cpu"},
    ]
    made = {
        "schema": "duotone.zoo-choice/1",
        **sources[-1],
        "sources": sources,
        "widths": [choose.report(_cases(), [BOLD, SAFE], 1)],
    }
    return json.loads(json.dumps(made))


def test_choices_become_tables(result) -> None:
    order = zoo_tables.order_table([result])
    assert (
        "| held-out choice | **1: 1 ± 0** (1.50) | **1: 1 ± 0** (1.50) | 3: 6 ± 0 (1.50) |" in order
    )
    stresses = zoo_tables.stress_table([result])
    assert "| 1 | a | 0.50 of min/max | 0.50 of min/max |" in stresses
    assert "| 1 | c | 3.00 of min/max |  |" in stresses


@pytest.mark.parametrize("table", [zoo_tables.order_table, zoo_tables.stress_table])
def test_tables_name_all_commits_and_devices(result, table) -> None:
    footer = f"a card, cpu; torch 2; commit {'b' * 10}, {'c' * 10}; 2026-11-27"
    assert table([result]).endswith(f"{footer}.*")
    del result["sources"]
    assert f"sequences; cpu; torch 2; commit {'c' * 10}; 2026-11-27.*" in table([result])


def test_candidates_without_numbers_in_a_case_are_dropped_by_name(result) -> None:
    first, *others = _cases()
    rows = {name: row for name, row in first.rows.items() if name not in (SAFE, OTHER)}
    failed = {SAFE: "RuntimeError: no", OTHER: "ValueError: none", "min/max@2": "of 2 bits"}
    case = replace(first, rows=rows, failed=failed)
    lost = {"model": "a", "stress": "none"}
    found = choose.report([case, *others], [BOLD, SAFE, "parts, new@1"], 1)
    assert found["preset"] == BOLD
    assert found["dropped"][:3] == [
        {"row": SAFE, **lost, "why": "RuntimeError: no"},
        {"row": "parts, new@1", **lost, "why": "not in the file"},
        {"row": OTHER, **lost, "why": "ValueError: none"},
    ]
    assert {row["row"] for row in found["dropped"][3:]} == {"parts, new@1"}
    result["widths"] = [found]
    left_out = f"; without numbers in some case: {OTHER}, parts, new@1, {SAFE}.*"
    assert zoo_tables.order_table([result]).endswith(left_out)
    with pytest.raises(ValueError, match="needs a plain code of 2 bits; got none for a, none"):
        case.best_plain(2)


def _file(folder, name: str, **changes: object) -> None:
    rows = [
        {"row": "16 bit", "tokens": [2]},
        {"row": PLAIN, "kl": 1.0, "kl_sums": [2.0]},
        {"row": SAFE, "failed": "RuntimeError: no"},
    ]
    header = {"schema": "duotone.zoo/1", "model": "deep", "stress": "none", "versions": {}}
    data = header | {"created": "2026-11-27", "commit": "c", "device": "cpu", "rows": rows}
    (folder / name).write_text(json.dumps(data | changes))


def test_the_header_names_the_provenance_of_every_file(tmp_path) -> None:
    _file(tmp_path, "a.json")
    _file(tmp_path, "b.json", created="2026-11-26", commit="b", device="a card", stress="keys x8")
    cases, header = choose.read_cases(tmp_path)
    assert (header["commit"], header["device"]) == ("c", "cpu")
    found = [(one["commit"], one["device"], one["stress"]) for one in header["sources"]]
    assert found == [("b", "a card", "keys x8"), ("c", "cpu", "none")]
    assert [case.failed for case in cases] == [{SAFE: "RuntimeError: no"}] * 2


def test_what_is_dropped_is_printed_and_written(tmp_path, monkeypatch, capsys) -> None:
    known = candidates(1)
    kept, lost, *_ = [name for name, spec in known.items() if within_bounds(spec, 1)]
    numbers = {"kl": 1.0, "kl_sums": [2.0], "kl_interval": 0.0, "visual_bits": 1.5}
    rows = [{"row": "16 bit", "tokens": [2]}, {"row": PLAIN, **numbers}]
    rows += [{"row": name, **numbers} for name in known if name != lost]
    rows.append({"row": lost, "failed": "RuntimeError: no"})
    for model in ("one", "two"):
        _file(tmp_path, f"{model}.json", rows=rows, model=model)
    out = tmp_path / "choice" / "out.json"
    out.parent.mkdir()
    monkeypatch.setattr("benchmarks.quality.choose.WIDTHS", (1, 3))
    monkeypatch.setattr("sys.argv", ["choose", str(tmp_path), "--out", str(out)])
    choose.main()
    said = capsys.readouterr().out
    assert f"dropped  {lost}, by one, none: RuntimeError: no" in said
    assert "3 bits: no candidates in these files" in said
    (width,) = json.loads(out.read_text())["widths"]
    assert {row["row"] for row in width["dropped"]} == {lost}
    assert kept in width["worst"]
    assert lost not in width["worst"]


def test_files_of_other_benchmarks_are_refused(tmp_path) -> None:
    (tmp_path / "other.json").write_text('{"schema": "duotone.tune/1"}')
    with pytest.raises(ValueError, match=r"files of zoo\.py"):
        choose.read_cases(tmp_path)


def test_files_without_sums_by_sequence_are_refused(tmp_path) -> None:
    old = {
        "schema": "duotone.zoo/1",
        "created": "2026-11-25T00:00:00",
        "commit": "c" * 40,
        "versions": {},
        "device": "cpu",
        "model": "deep",
        "stress": "none",
        "rows": [{"row": "16 bit", "accuracy": 1.0}],
    }
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match=r"sums by sequence, .* got deep, none, of 2026-11-25"):
        choose.read_cases(tmp_path)


def test_bits_of_spans_have_bounds() -> None:
    known = candidates(1)
    assert set(known) == {f"parts, {name}@1" for name in CANDIDATES[1]}
    assert all(within_bounds(scheme("duotone", bits=bits), bits) for bits in (1, 2, 4))
    assert not within_bounds(scheme("duotone-whole", bits=1), 1)
    plain = scheme("minmax", bits=1)
    assert span_bits(plain, 256, CHANNELS, LAYERS) == 1.125
    wider = KVSpec(TensorSpec(2), TensorSpec(2))
    ruled = plain.replace(layers=(LayerRule(0, 2, visual=wider),))
    assert span_bits(ruled, 256, CHANNELS, LAYERS) == 1.125 + 1 / 4
    with pytest.raises(ValueError, match="need a KVSpec"):
        span_bits(CacheSpec(visual="dense"), 49, CHANNELS, LAYERS)
    assert sum(within_bounds(spec, 1) for spec in known.values()) >= 3


def test_the_page_of_schemes_has_todays_bits() -> None:
    page = (REPOSITORY / "docs" / "schemes.md").read_text(encoding="utf-8")
    for tokens, verb in ((49, " holds"), (64, ""), (256, "")):
        each = [scheme("duotone", bits=bits) for bits in range(1, 5)]
        found = [f"{span_bits(spec, tokens, CHANNELS, LAYERS):.2f}" for spec in each]
        assert f"of {tokens} tokens{verb} {', '.join(found[:3])} or {found[3]}" in page


@pytest.mark.parametrize(
    ("bits", "name"),
    [
        (1, "finer, first K 2 bits, .37 and .08, one part"),
        (2, "even, sharp, .36 and .22, first 4 bits, V gain 1.1, one part"),
        (3, "front 4 bits, back more of K"),
        (4, "parts of 4 bits"),
    ],
)
def test_a_preset_is_a_candidate(bits: int, name: str) -> None:
    assert scheme("duotone", bits=bits) == CANDIDATES[bits][name].spec
    cases, _ = choose.read_cases(REPOSITORY / "results" / "zoo")
    assert len(cases) == 18
    for case in cases:
        ours, candidate = (case.rows[f"{row}@{bits}"] for row in ("duotone", f"parts, {name}"))
        assert ours | {"row": ""} == candidate | {"row": ""}
