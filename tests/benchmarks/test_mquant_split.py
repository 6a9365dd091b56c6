import pytest
import torch
from mquant_split import PUBLISHED_PLANS, published, split_rows, sqnr_db, transform_with

from duotone.weights.equivalences.hadamard import transform_back

from exactly import assert_same


@pytest.fixture(scope="module")
def rows():
    found = split_rows({"gelu": (5120, "gelu"), "172": (11008, "swiglu")})
    return {(r["model"], r["transform"], r["split"]): r for r in found}


def test_every_way_with_and_without_the_split(rows):
    assert len(rows) == 2 * (1 + 3 * 2)
    assert rows["172", "as published", True]["channel0_share"] == pytest.approx(0.00865, abs=1e-4)


def test_what_the_split_is_worth(rows):
    def sqnr(model, way, split):
        return rows[model, way, split]["sqnr_db"]

    # As published, 172 has no outlier in channel 0 to split off: nothing is gained.
    assert abs(sqnr("172", "as published", True) - sqnr("172", "as published", False)) < 0.1
    for model in ("gelu", "172"):
        ours = sqnr(model, "sign-normalised", True)
        assert ours > sqnr(model, "as published", True)
        assert ours > sqnr(model, "random signs", False) > sqnr(model, "sign-normalised", False)


@pytest.mark.parametrize("size", PUBLISHED_PLANS)
def test_published_transforms_are_orthogonal(size):
    plan, signs = published(size)
    x = torch.randn(2, size).double()
    y = transform_with(x, plan, signs)
    assert_same(y.norm(dim=1), x.norm(dim=1), 1e-12)
    assert not torch.allclose(transform_back(y, plan), x) or bool((signs == 1).all())


def test_sqnr():
    x = torch.ones(10)
    assert sqnr_db(x, x * 0.9) == pytest.approx(20)
    assert sqnr_db(x, x) == float("inf")
