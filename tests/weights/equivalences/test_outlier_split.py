import pytest
import torch

from duotone.weights.equivalences.hadamard import HadamardPlan, plan_hadamard, transform
from duotone.weights.equivalences.outlier_split import exceeds, split_channel0, wants_split

from exactly import assert_same


@pytest.mark.parametrize("size", [12, 56, 91, 148, 256])
@pytest.mark.parametrize("bias", [True, False])
def test_the_split_changes_nothing_before_quantization(size, bias):
    plan = plan_hadamard(size)
    x, w = torch.randn(3, 2, size).double(), torch.randn(7, size).double() + 0.4
    b = torch.randn(7).double() if bias else None
    split, turned = split_channel0(transform(w, plan)), transform(x, plan)
    main = torch.nn.functional.linear(turned, split.main, b)
    ours = main + turned[..., :1] * split.column
    assert_same(ours, torch.nn.functional.linear(x, w, b), 1e-12)
    assert not split.main[:, 0].any()
    assert torch.equal(split.column, transform(w, plan)[:, 0])


def test_eq_8_names_the_rows_that_get_an_outlier():
    torch.manual_seed(0)
    w = torch.randn(6, 512)
    w[::2] += 1
    w[4] -= 2
    assert exceeds(w).tolist() == [True, False] * 3
    assert wants_split(w)
    assert not wants_split(w[1::2])
    turned = transform(w, plan_hadamard(512)).abs()
    assert torch.equal(turned[:, 0] > w.abs().amax(1), exceeds(w))


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        (plan_hadamard(11008), 1),
        (plan_hadamard(18944), 1),
        (HadamardPlan(18944, 18944, 37, 1, 512), 1 / 37),
        (plan_hadamard(13696), 13696 / 13824),
        (plan_hadamard(4304), 4304 / 4352),
    ],
    ids=str,
)
def test_share_of_the_mean_in_channel_0(plan, share):
    energy = transform(torch.ones(plan.size).double(), plan).square()
    assert float(energy[0] / energy.sum()) == pytest.approx(share)


def test_bad_weights_are_refused():
    for function in (exceeds, split_channel0):
        with pytest.raises(ValueError, match=r"weight \[out, in\]"):
            function(torch.zeros(3))
