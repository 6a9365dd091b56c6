"""Numbers of steps on pages by the kernels' own sources on a CPU, as torch has them."""

import pytest
import torch

from duotone.attention.cuda.groups import step_numbers as steps
from duotone.attention.cuda.groups.step_numbers import StepNumbers, numbers_by_torch

from cuda_on_cpu import missing, run_on_cpu

needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def step(tokens: int) -> tuple:
    """Requests about the edges of pages; one without a slot, one that fills up the batch."""
    lengths = torch.tensor([1, tokens, 3 * tokens, 3 * tokens - 1, tokens, 0]).int()
    drawn = torch.randperm(200).int().view(10, 20) + 1
    rings = [drawn[:, :2], drawn[:, 2:3], drawn[:, 3:7]]
    return lengths, drawn[: len(lengths), 7:], rings, torch.tensor([0, 5, 9, 1, -1, -1])


@needs_compiler
@pytest.mark.parametrize(("tokens", "ring"), [(32, 5), (64, 3), (128, 6)])
def test_numbers_of_a_step_are_those_of_torch(tokens, ring, monkeypatch, folder) -> None:
    run_on_cpu(steps, monkeypatch, folder)
    given = step(tokens)
    found, wanted = (StepNumbers.zeros(8, ring, torch.device("cpu")) for _ in range(2))
    for numbers, call in ((found, steps.step_numbers), (wanted, numbers_by_torch)):
        for tensor in vars(numbers).values():
            tensor.fill_(7)
        call(*given, tokens, numbers)
    for name, x in vars(wanted).items():
        assert torch.equal(getattr(found, name), x), name
    assert wanted.full.count_nonzero() == 4  # two, and two that are no requests
    assert (wanted.rings[6:] == 7).all()


def test_numbers_of_other_types_are_refused() -> None:
    lengths, pages, rings, slots = step(32)
    into = StepNumbers.zeros(6, 5, torch.device("cpu"))
    for given in (
        (lengths.long(), pages, rings, slots),
        (lengths, pages.T, rings, slots),
        (lengths, pages, rings, slots.int()),
    ):
        with pytest.raises(ValueError, match="must be int32"):
            steps.step_numbers(*given, 32, into)
