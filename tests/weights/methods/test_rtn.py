import pytest
import torch

from duotone.weights.methods.rtn import packed, round_to_nearest, weight_scale
from duotone.weights.modules.packed_weight import PackedWeight


def weight(rows=5, columns=12, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def restored(codes, scale):
    columns = 1 if scale.dim() == 1 else codes.shape[1] // scale.shape[1]
    wide = scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(columns, 1)
    return codes * wide


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [None, 4])
def test_rounding_is_off_by_at_most_half_a_step(bits, group):
    w = weight()
    codes, scale = round_to_nearest(w, bits, group)
    step = restored(torch.ones_like(w), scale)
    assert ((restored(codes, scale) - w).abs() <= step / 2 + 1e-6).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_magnitude_has_the_highest_code(bits):
    w = torch.tensor([[0.5, -2.0, 1.0, 2.0]])
    codes, scale = round_to_nearest(w, bits)
    assert scale.tolist() == pytest.approx([2.0 / (7 if bits == 4 else 127)])
    assert codes[0, 3] == -codes[0, 1] == (7 if bits == 4 else 127)


def test_clipping_lowers_the_error_of_a_weight_with_an_outlier():
    w = weight(4, 256)
    w[:, 3] = 6
    errors = [(restored(*round_to_nearest(w, 4, clip=c)) - w).abs().pow(2.4).sum() for c in (0, 1)]
    assert errors[1] < errors[0]


def test_rows_of_zeros_stay_zeros():
    codes, scale = round_to_nearest(torch.zeros(3, 4), 4, clip=True)
    assert not codes.any()
    assert scale.isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_storage_holds_the_same_codes(bits):
    codes, scale = round_to_nearest(weight(), bits, 4)
    kept = packed(codes, scale, bits, torch.ones(5))
    assert isinstance(kept, PackedWeight)
    assert kept.group_size == 4
    assert torch.equal(kept.unpacked().float(), codes)


@pytest.mark.parametrize(
    ("bits", "group", "message"), [(3, None, "have"), (4, 5, "must divide the 12 input channels")]
)
def test_what_does_not_fit_is_refused(bits, group, message):
    with pytest.raises(ValueError, match=message):
        weight_scale(weight(), bits, group)
