"""Attention of long chunks on dequantized tokens equals attention from codes."""

from dataclasses import replace

import pytest
import torch

from duotone.attention import attend, attend_chunk, chunk
from duotone.cache import Visibility
from duotone.cache.segments import Segment
from duotone.quant import TensorSpec
from duotone.tools.slow_paths import SlowPaths, SlowPathWarning

from cases import INNERQ_KEY, INNERQ_VALUE, PRESET_KEY, Case, build, poisoned

K2, V2 = TensorSpec(2, group=32), TensorSpec(2, "channels", 32)
QUERIES = 9
CASES = [
    Case((40, 1, 17), K2, V2, gqa=1, kv_heads=2, dense=(9, 0, 3)),
    Case((70,), PRESET_KEY, gqa=6, head_dim=80),
    Case((33, 64), K2, V2, gqa=7, value_dim=96, dense=(4, 1)),
    Case((33, 5), INNERQ_KEY, INNERQ_VALUE, head_dim=128, key_norm=True, dense=(2, 2)),
]


@pytest.fixture
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of one query fill a pass; masks of four queries fill a piece."""
    monkeypatch.setattr("duotone.attention.reference.MAX_SCORES", 1)
    monkeypatch.setattr(chunk, "attend", _never)


def _never(*args: object, **kwargs: object) -> None:
    raise AssertionError("the codes were decoded once per pass")


def _chunk_of(case: Case) -> tuple[torch.Tensor, list[Segment]]:
    """The case with 9 queries and a mask of each; its first query of all sees nothing."""
    one, kv = build(case)
    query = torch.randn(len(one), one.shape[1], QUERIES, one.shape[3], dtype=one.dtype)
    masked = []
    for segment in kv:
        mask = torch.rand(len(one), QUERIES, segment.tokens) < 0.7
        mask[0, 0] = False
        masked.append(replace(segment, mask=mask))
    return query, masked


@pytest.mark.usefixtures("short_passes")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("way", ["rows", "heads", "long", "pieces"])
def test_long_chunks_equal_the_reference(
    case: Case, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries as rows of their kv head, or K and V of all heads: the mask of rows is larger."""
    query, kv = _chunk_of(replace(case, dtype=torch.float32))
    mask = len(query) * sum(segment.tokens for segment in kv) * QUERIES
    most = {"rows": mask * case.gqa, "heads": mask, "long": mask * case.gqa, "pieces": mask // 3}
    monkeypatch.setattr(chunk, "FEW_QUERIES", QUERIES - (way == "long"))
    monkeypatch.setattr(chunk, "MAX_MASK", most[way])
    heads, attended = [], chunk._attended

    def counted(query: torch.Tensor, *given: object) -> torch.Tensor:
        heads.append(query.shape[1])
        return attended(query, *given)

    monkeypatch.setattr(chunk, "_attended", counted)
    out = attend_chunk(query, poisoned(kv), sm_scale=0.1)
    expected = attend(query.double(), kv, sm_scale=0.1)
    # Dequantized tokens are in the model's type, here float32 or half of it.
    assert (out - expected).abs().max() < 2e-3 * expected.abs().max()
    assert torch.equal(out[0, :, 0], torch.zeros_like(out[0, :, 0]))
    of_kv_heads, of_all = case.kv_heads, case.kv_heads * case.gqa
    assert heads == [of_kv_heads if way == "rows" else of_all] * (3 if way == "pieces" else 1)


@pytest.mark.usefixtures("short_passes")
@pytest.mark.parametrize("few", [0, QUERIES])
def test_layers_with_other_heads_share_masks(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have layers with other numbers of kv heads (Gemma 4), or with other tokens."""
    monkeypatch.setattr(chunk, "FEW_QUERIES", few)
    query, kv = _chunk_of(replace(CASES[2], dtype=torch.float32))
    seen = Visibility(kv[0].mask)
    for heads in (7, 2, 7, 1):
        for segments in (kv, kv[:1], kv):
            expected = attend_chunk(query[:, :heads], segments, sm_scale=0.1)
            found = attend_chunk(query[:, :heads], segments, sm_scale=0.1, seen=seen)
            assert torch.equal(found, expected)


@pytest.mark.usefixtures("short_passes")
def test_a_mask_is_read() -> None:
    query, kv = _chunk_of(replace(CASES[0], dtype=torch.float32))
    open_ones = [replace(segment, mask=None) for segment in kv]
    assert not torch.allclose(
        attend_chunk(query, kv, sm_scale=0.1), attend_chunk(query, open_ones, sm_scale=0.1)
    )


def test_short_chunks_run_from_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    query, kv = _chunk_of(CASES[0])
    monkeypatch.setattr(chunk, "_on_dequantized", _never)
    assert torch.equal(attend_chunk(query, kv, sm_scale=0.1), attend(query, kv, sm_scale=0.1))


def test_calibrated_scores_are_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duotone.attention.reference.MAX_SCORES", 1)
    query, kv = _chunk_of(CASES[1])
    with pytest.warns(SlowPathWarning, match="later prompt runs by PyTorch operations.*tau"):
        found = attend_chunk(query, kv, sm_scale=0.1, tau=(0.0, 3.0), slow=SlowPaths())
    assert torch.equal(found, attend(query, kv, sm_scale=0.1, tau=(0.0, 3.0)))
