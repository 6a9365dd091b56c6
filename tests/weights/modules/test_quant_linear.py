import pytest
import torch
from torch import nn

from duotone.weights.equivalences.hadamard import plan_hadamard
from duotone.weights.equivalences.online import RotatedInput
from duotone.weights.methods.observer import Observer, Rows
from duotone.weights.methods.quantize import quantize_linear, wanted_by
from duotone.weights.methods.recipe import Recipe
from duotone.weights.modules.checkpoint_records import made_of
from duotone.weights.modules.modality import Modality
from duotone.weights.modules.quant_linear import QuantLinear

RTN8 = Recipe(bits=8, method="rtn")


def inputs(rows=37, columns=12, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def linear(outs=5, columns=12, bias=True, plan=False):
    torch.manual_seed(1)
    made = nn.Linear(columns, outs, bias=bias).requires_grad_(False)
    if not plan:
        return made
    return RotatedInput.around(made, plan_hadamard(columns))


def quantized(module, x, recipe, rows=None, **options):
    observer = Observer(
        {"it": module}, wanted_by(recipe), frozenset(["it"] * options.get("split", 0))
    )
    observer.rows = rows or Rows()
    with observer.watching():
        module(x)
    return quantize_linear(module, observer.of("it"), recipe, **options).linear


def relative_error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_are_near_those_of_the_linear(plan, split, bits):
    if not plan and split:
        pytest.skip("belongs to a transform")
    module, x = linear(plan=plan), inputs()
    recipe = Recipe(bits=bits, online="hadamard", clip=bits == 4)
    made = quantized(module, x, recipe, split=split)
    assert made.mode == f"w{bits}a8"
    assert relative_error(made(x), module(x)) < (0.02 if bits == 8 else 0.2)


def test_a_split_channel_keeps_its_precision_and_the_others_gain_some():
    x = inputs(200) + 20
    module = linear(plan=True)
    errors = []
    for split in (False, True):
        made = quantized(module, x, RTN8.replace(online="hadamard"), split=split)
        errors.append(relative_error(made(x), module(x)))
    assert errors[1] < errors[0] / 2


def test_rows_take_the_scale_of_their_modality():
    x, visual = inputs(), torch.arange(37) % 3 == 0
    x[visual] *= 50
    module, modality = linear(), Modality()
    recipe = RTN8.replace(modality_scales=True)
    made = quantized(module, x, recipe, Rows(None, visual), two_scales=True, modality=modality)
    assert made.scales[1] > 20 * made.scales[0]
    with modality.rows(visual[None]):
        assert relative_error(made(x), module(x)) < 0.02
        whole = made(x)
    apart = made(x[~visual])
    assert torch.equal(whole[~visual], apart)


def test_groups_are_padded_where_the_channels_do_not_come_out():
    made = quantized(linear(), inputs(), Recipe(group=8, activation="none"))
    assert made.packed.shape == (5, 16)
    assert made.mode == "w4a16"
    assert relative_error(made(inputs()), linear()(inputs())) < 0.2


@pytest.mark.parametrize("activation", ["static", "dynamic"])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_with_integer_activations(bits, activation):
    module, x = linear(columns=100), inputs(columns=100)
    with torch.no_grad():
        module.weight[:, 64:] *= 100
    recipe = Recipe(bits=bits, method="rtn", activation=activation)
    made, whole = (quantized(module, x, recipe.replace(group=g)) for g in (32, None))
    assert made.packed.shape == (5, 128)
    assert made.mode == f"w{bits}a8"
    x[:, 64:] = 0
    wanted = module(x)
    # the small columns' scales are their own
    assert relative_error(made(x), wanted) < min(0.2, relative_error(whole(x), wanted) / 4)
    again = made_of(made.record(), torch.float32, Modality())
    assert all(tensor.is_meta for tensor in again.state_dict().values())
    again.load_state_dict(made.state_dict(), assign=True)
    assert torch.equal(again(x), made(x))


def test_a_static_scale_is_of_the_largest_magnitude_of_all_batches():
    module, x = linear(), inputs()
    observer = Observer({"it": module}, wanted_by(RTN8))
    with observer.watching():
        for batch in (x, -70.5 * torch.ones_like(x), x):
            module(batch)
    made = quantize_linear(module, observer.of("it"), RTN8).linear
    assert made.scales.tolist() == pytest.approx([70.5 / 127])


def test_zeros_give_a_scale_that_divides():
    assert quantized(linear(), torch.zeros(3, 12), RTN8).scales > 0


def test_dynamic_scales_come_from_each_row():
    x = inputs() * torch.logspace(-3, 3, 37)[:, None]
    made = quantized(linear(bias=False), x, RTN8.replace(activation="dynamic"))
    wanted = linear(bias=False)(x)
    assert ((made(x) - wanted).norm(dim=1) < 0.02 * wanted.norm(dim=1)).all()


def test_scales_stay_float32_when_the_model_is_cast():
    made = quantized(linear(), inputs(), RTN8)
    before = {name: getattr(made, name).clone() for name in ("scales", "weight_scale")}
    made.to(torch.bfloat16)
    assert made.bias.dtype == torch.bfloat16
    assert all(torch.equal(getattr(made, name), value) for name, value in before.items())


def test_a_record_with_random_signs_is_refused():
    record = quantized(linear(), inputs(), RTN8).record() | {"signs": True}
    with pytest.raises(ValueError, match=r"no random signs.*static-msq-signs; quantize the model"):
        made_of(record, torch.float32, Modality())


def test_any_shape_of_batch():
    made = quantized(linear(), inputs(), RTN8)
    x = inputs(24).view(2, 3, 4, 12)
    assert torch.equal(made(x).flatten(0, 2), made(x.flatten(0, 2)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "fp8"}, "activation must be one of"),
        ({"scales": None}, "static activations, and only they"),
        ({"scales": torch.ones(3)}, "one] or"),
    ],
)
def test_scales_that_do_not_go_with_the_activation_are_refused(changes, message):
    made = quantized(linear(), inputs(), RTN8)
    fields = {"activation": "static", "scales": torch.ones(1)} | changes
    with pytest.raises(ValueError, match=message):
        QuantLinear(made.packed, **fields)
