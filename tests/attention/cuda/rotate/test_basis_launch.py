"""Launches of a call in bases, caught without a GPU."""

from dataclasses import replace

import pytest
import torch
from launch_cases import attend_records

import duotone
from duotone.attention.cuda import decode
from duotone.attention.cuda.rotate import queries as rotate_queries

from basis_cases import build_spans, in_bases, laid_out, some_bases
from cases import CALIBRATED, Case

CASE = Case((900, 300), *CALIBRATED, head_dim=128, kv_heads=2, dense=(9, 70))
DECODES = ["classes/decode.cu", "classes/decode.cu", "dense/decode.cu"]


@pytest.fixture
def file(tmp_path) -> str:
    return some_bases(tmp_path, CASE.kv_heads, CASE.head_dim)


def launched(caught, cases: list[Case], tau=None) -> tuple[list[str], torch.Tensor, list]:
    """(files of the launches, output, segments) of a call."""
    query, kv = build_spans(cases)
    kv = laid_out(kv)
    out = attend_records(query, kv, sm_scale=0.1, tau=tau)
    assert (out.dtype, out.shape) == (query.dtype, query.shape)
    return [one.source for one in caught], out, kv


def test_spans_in_one_basis_take_two_launches_more(caught, file) -> None:
    case = in_bases(CASE, file)
    sources, out, _ = launched(caught, [case, case])
    assert sources == ["rotate/queries.cu", *DECODES, "rotate/merge.cu"]
    turn, *decodes, merge = caught
    assert {one.given.query for one in decodes[:2]} == {turn.given.out}
    assert decodes[2].given.query == turn.given.query
    assert [one.macros["OVERLAP"] for one in caught] == [1, 1, 2, 2, 2]
    assert all(one.at.overlap for one in caught)
    assert [one.macros["MERGE"] for one in decodes] == [2, 2, 2]
    for name in ("partial", "weights", "out", "out_stride", "lse", "all_parts"):
        assert len({getattr(one.given, name) for one in [*decodes, merge]}) == 1
    assert merge.given.out == out.data_ptr()
    parts = [one.given.blocks * one.given.splits for one in decodes]
    assert [one.given.first_part for one in decodes] == [0, parts[0], sum(parts[:2])]
    assert (merge.given.rotated_parts, merge.given.all_parts) == (sum(parts[:2]), sum(parts))
    assert (merge.given.rows, merge.given.kv_heads) == (2 * CASE.gqa, CASE.kv_heads)
    assert merge.given.matrix_stride == 128**2


def test_matrices_are_those_of_the_basis(caught, file) -> None:
    case = in_bases(CASE, file, 1)
    launched(caught, [case])
    turn, *_, merge = caught
    for one, name, role in ((turn, "key", "query"), (merge, "value", "back")):
        transform = getattr(case, name).transform
        wanted = rotate_queries.kernel_matrices(transform, role, 128, torch.device("cpu"))
        assert one.given.matrices == wanted.data_ptr()
        assert wanted.is_contiguous()


def test_queries_are_turned_once_for_each_basis(caught, file) -> None:
    first, second = (replace(in_bases(CASE, file, i), value=CASE.value) for i in range(2))
    sources, *_ = launched(caught, [first, second, first])
    assert sources.count("rotate/queries.cu") == 2
    assert "rotate/merge.cu" not in sources


def test_keys_behind_other_norms_want_other_queries(caught, file) -> None:
    case = replace(in_bases(CASE, file), key_norm=True)
    sources, *_ = launched(caught, [case, case])
    assert sources.count("rotate/queries.cu") == 2


def test_one_matrix_of_all_heads_stands_for_each(caught) -> None:
    visual = duotone.scheme("duotone-tuned").visual
    assert visual.value.transform == "hadamard"
    sources, *_ = launched(caught, [replace(CASE, key=visual.key, value=visual.value)])
    assert sources[-3:] == ["classes/decode.cu", "dense/decode.cu", "rotate/merge.cu"]
    assert caught[-1].given.matrix_stride == 0


def test_two_bases_are_merged_at_once(caught, file) -> None:
    first, second = (in_bases(CASE, file, i) for i in range(2))
    sources, *_ = launched(caught, [second, first, second])
    merge = caught[-1]
    assert sources.count("rotate/queries.cu") == 2
    assert sources[-1] == "rotate/merge.cu"
    assert merge.macros["BASES"] == 2
    decodes = [one for one in caught if one.source in DECODES]
    parts = [one.given.blocks * one.given.splits for one in decodes]
    # Launches of one basis follow one another: the first by name, then both of the other.
    assert (merge.given.rotated_parts, merge.given.other_parts) == (parts[0], sum(parts[1:3]))
    for case, field in ((first, "matrices"), (second, "other_matrices")):
        cpu = torch.device("cpu")
        back = rotate_queries.kernel_matrices(case.value.transform, "back", 128, cpu)
        assert getattr(merge.given, field) == back.data_ptr()
    assert merge.given.other_stride == 128**2


@pytest.mark.parametrize("why", ["three bases", "head_dim"])
def test_torch_merges_what_the_launch_does_not(caught, file, why, monkeypatch) -> None:
    visual = duotone.scheme("duotone-tuned").visual
    cases = [in_bases(CASE, file, i) for i in range(2)]
    cases.append(replace(CASE, key=visual.key, value=visual.value))
    if why == "head_dim":
        cases = cases[:1]
        for module in (decode, rotate_queries):
            monkeypatch.setattr(module, "DEPTHS", {})
    sources, *_ = launched(caught, cases)
    assert "rotate/merge.cu" not in sources
    assert sources.count("rotate/queries.cu") == (0 if why == "head_dim" else 2)
    decodes = [one for one in caught if one.source != "rotate/queries.cu"]
    assert all(one.given.lse and one.macros["OUT"] == 2 for one in decodes)
