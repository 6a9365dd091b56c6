import pytest
import torch
from torch import nn

from duotone.weights.equivalences.hadamard import plan_hadamard, transform
from duotone.weights.equivalences.online import RotatedInput
from duotone.weights.methods.observer import TEXT, VISUAL, Observer, Rows, Wanted

ALL = Wanted(limits=True, moments=True, largest=True)


class Block(nn.Module):
    """Two linears of one input, one of another."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)
        self.c = RotatedInput.around(nn.Linear(4, 2), plan_hadamard(4))

    def forward(self, x):
        return self.a(x) + self.b(x), self.c(x)


def watched(x, rows=None, wanted=ALL, split=frozenset()):
    torch.manual_seed(0)
    block = Block()
    observer = Observer({"a": block.a, "b": block.b, "c": block.c}, wanted, split)
    observer.rows = rows or Rows()
    with observer.watching(), torch.no_grad():
        block(x)
    return observer, block


def x_of(rows=9):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(3))


def test_linears_of_one_input_share_their_statistics_and_others_do_not():
    observer, _ = watched(x_of())
    assert observer.of("a") is observer.of("b")
    assert observer.of("c") is not observer.of("a")


def test_what_is_gathered_is_behind_the_transform():
    x = x_of()
    observer, block = watched(x)
    turned = transform(x, block.c.plan)
    torch.testing.assert_close(observer.of("a").moments, x.T @ x)
    torch.testing.assert_close(observer.of("c").moments, turned.T @ turned)
    torch.testing.assert_close(observer.of("c").largest, turned.abs().amax(0))


def test_the_largest_is_that_of_all_batches():
    observer, batches = Observer({"a": nn.Linear(4, 3)}, Wanted(largest=True)), [[9.0, -5, 0, 1]]
    batches.append([2.0, 3, -1, 0])
    with observer.watching():
        for x in batches:
            observer.linears["a"](torch.tensor([x]))
    assert observer.of("a").largest.tolist() == [9, 5, 1, 1]


def test_modalities_are_told_apart_and_padding_left_out():
    x = x_of()
    visual = torch.tensor([0, 1, 1, 0, 0, 1, 0, 0, 0]).bool()
    real = torch.arange(9) > 1
    observer, _ = watched(x, Rows(real, visual))
    found = observer.of("a")
    assert found.tokens == {TEXT: 5, VISUAL: 2}
    assert found.limits[VISUAL] == pytest.approx(float(x[[2, 5]].abs().max()))
    torch.testing.assert_close(found.moments, x[real].T @ x[real])


def test_a_split_channel_is_not_in_the_limits():
    x = x_of()
    x[:, 0] = 1000
    observer, _ = watched(x, split=frozenset({"a"}))
    assert observer.of("a").limits[TEXT] < 10


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_activations_that_are_not_finite_are_refused(wrong):
    x = x_of()
    x[3, 2] = wrong
    with pytest.raises(ValueError, match="must be finite"):
        watched(x)


def test_hooks_are_gone_afterwards():
    observer, block = watched(x_of())
    block(x_of())
    assert observer.of("a").tokens == {TEXT: 9}


def test_wrong_masks_and_linears_that_never_ran_are_refused():
    with pytest.raises(ValueError, match="one entry per row, got 5 for 9"):
        watched(x_of(), Rows(torch.ones(5).bool()))
    observer = Observer({"a": nn.Linear(2, 2)}, ALL)
    with pytest.raises(ValueError, match="'a' got no input"):
        observer.of("a")
