"""Numbers of steps on pages by the kernels' own sources on a CPU, as torch has them."""

import pytest
import torch

from duotone.attention.cuda.groups import chunk_numbers as chunks
from duotone.attention.cuda.groups import step_numbers as steps
from duotone.attention.cuda.groups.chunk_numbers import REQUEST_NUMBERS, Pages, Requests
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


def chunk(tokens: int, before: list[int]) -> tuple:
    """Requests of rows in no order, of which the third is not kept and windows read the rest."""
    drawn, new = torch.randperm(200).int().view(5, 40) + 1, [3, 2 * tokens + 5, tokens, 1]
    past = [count // tokens for count in before]
    requests = Requests([4, 0, 1, 3], new, before, [0, *past[1:]], tokens)
    slots = torch.zeros(sum(new), dtype=torch.long)
    slots[-1 - tokens :] = -1
    slots[-1] = 0
    numbers = torch.tensor(requests.numbers, dtype=torch.int32).view(-1, REQUEST_NUMBERS)
    return requests, numbers, drawn[:, 5:], drawn[:, :5], slots, Pages(tokens, 16, 5, 2)


@needs_compiler
@pytest.mark.parametrize("before", [[0, 64, 0, 128], [95, 130, 1, 63]], ids=str)
@pytest.mark.parametrize("tokens", [32, 64])
def test_numbers_of_chunks_are_those_of_torch(tokens, before, monkeypatch, folder) -> None:
    run_on_cpu(chunks, monkeypatch, folder)
    given = chunk(tokens, before)
    found, wanted = chunks.chunk_numbers(*given), chunks.numbers_by_torch(*given)
    for name, x in vars(wanted).items():
        y = getattr(found, name)
        assert x is y or torch.equal(x, y), name
    assert wanted.pages.count_nonzero() < len(wanted.pages)
    assert (wanted.opened is None) == (not any(count % tokens for count in before))
    with pytest.raises(ValueError, match="must be int32"):
        chunks.chunk_numbers(*given[:2], given[2].long(), *given[3:])
