"""Products of the bench's decoder: what stands behind gate and up."""

import pytest
import torch

from duotone.bench import linears
from duotone.bench.linears import DenseLinears, IntegerLinears
from duotone.weights.modules.gated import gated_reference
from duotone.weights.modules.online_hadamard import hadamard_quantize

CPU, HIDDEN, MLP = torch.device("cpu"), 32, 96


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_behind_a_gate_are_those_of_its_steps(bits: int) -> None:
    own = IntegerLinears(CPU, torch.float32, bits, MLP)
    matrix = own.matrix(2 * MLP, HIDDEN)
    entering = torch.randint(-127, 128, (5, HIDDEN), dtype=torch.int8)
    gate, up = own.product(entering, matrix).chunk(2, -1)
    given = (own.scale, own.plan.blocks, own.base, own.plan.power)
    wanted = hadamard_quantize(gate, *given, activation="silu", up=up)[0].codes
    assert torch.equal(own.gated(entering, matrix), wanted)


def test_one_launch_gives_the_same_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    own = IntegerLinears(CPU, torch.float32, 8, MLP)
    matrix = own.matrix(2 * MLP, HIDDEN)
    entering = torch.randint(-127, 128, (5, HIDDEN), dtype=torch.int8)
    wanted = own.gated(entering, matrix)
    joined: list[torch.Tensor] = []

    def one_launch(x_q, scale, gate, dtype):
        joined.append(gated_reference(x_q, scale, gate, dtype))
        return joined[0]

    monkeypatch.setattr(linears, "pays", lambda *_: True)
    monkeypatch.setattr(linears, "gated_product", one_launch)
    assert torch.equal(own.gated(entering, matrix), wanted)
    assert joined[0].shape == (5, MLP)


def test_sixteen_bits_go_through_the_gate() -> None:
    dense = DenseLinears(CPU, torch.float32, False)
    matrix, x = dense.matrix(2 * MLP, HIDDEN), torch.randn(5, HIDDEN)
    gate, up = (x @ matrix.T).chunk(2, -1)
    torch.testing.assert_close(dense.gated(x, matrix), torch.nn.functional.silu(gate) * up)
