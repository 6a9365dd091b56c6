"""Tables of bases: order of channels, padding, lifetime."""

import pytest
import torch

from duotone.weights.equivalences.hadamard_bases import sylvester
from duotone.weights.kernels import hadamard_table
from duotone.weights.kernels.hadamard_table import base_table, folded

CPU = torch.device("cpu")


def random_signs(m: int) -> torch.Tensor:
    return (torch.randint(0, 2, (m, m)) * 2 - 1).to(torch.int8)


@pytest.mark.parametrize(
    ("m", "p", "wanted"),
    [(148, 128, (148, 128)), (20, 256, (40, 128)), (28, 1024, (224, 128)), (12, 16, (12, 16))],
)
def test_powers_of_two_are_folded(m: int, p: int, wanted: tuple[int, int]) -> None:
    assert folded(m, p) == wanted


def test_a_folded_base_is_the_same_transform() -> None:
    base, (rows, p) = random_signs(12), folded(12, 512)
    table = base_table(base, rows, torch.float64, CPU)[:rows, :rows]
    wanted = torch.kron(base.long(), sylvester(512))
    assert torch.equal(torch.kron(table.long(), sylvester(p)), wanted)


@pytest.mark.parametrize(("rows", "size"), [(12, 64), (96, 128), (192, 256)])
def test_a_table_has_whole_tiles(rows: int, size: int) -> None:
    table = base_table(random_signs(12), rows, torch.bfloat16, CPU)
    assert table.shape == (size, size)
    assert table.abs().sum(dtype=torch.float32) == table[:rows, :rows].numel()


def test_a_table_lives_as_long_as_its_base() -> None:
    base, kept = random_signs(12), len(hadamard_table._tables)
    table = base_table(base, 24, torch.float16, CPU)
    assert base_table(base, 24, torch.float16, CPU) is table
    assert base_table(base, 24, torch.bfloat16, CPU).dtype == torch.bfloat16
    assert len(hadamard_table._tables) == kept + 1
    del base
    assert len(hadamard_table._tables) == kept
