import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from duotone.hf.graphs import decode_steps
from duotone.hf.graphs.host_values import HostValues

INDICES = [
    [1, 3],
    (slice(None), [0, -1]),
    (..., [2, 2]),
    [True, False, True, True],
    1,
    ([0, 1], [2, 0]),
    torch.tensor([True, False, True, True]),
    (slice(None), torch.tensor([1])),
]


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("value", [-1.5, 2, float("-inf"), torch.tensor(3.0)])
def test_lists_and_numbers_do_as_before(index, value):
    tensor = torch.arange(12.0).reshape(4, 3)
    expected, expected_set = tensor[index].clone(), tensor.clone()
    expected_set[index] = value
    with HostValues():
        assert torch.equal(tensor[index], expected)
        tensor[index] = value
    assert torch.equal(tensor, expected_set)


def test_each_value_is_copied_once():
    values, tensor = HostValues(), torch.zeros(4)
    for _ in range(3):
        with values:
            tensor[[1, 2]] = 1.0
    assert [x.tolist() for x in values._kept.values()] == [[1, 2], 1.0]
    with values:
        tensor[[0, 2]] = 1.0
        tensor.double()[[0, 2]] = 1.0
    assert len(values._kept) == 4


def test_nothing_is_copied_to_the_device_again(monkeypatch):
    """Indexing gets tensors of the device, so that a capture finds nothing to copy."""
    values, got = HostValues(), []
    with values:
        torch.zeros(2, 4)[:, [1, 2]] = 1
    real = values._on
    monkeypatch.setattr(values, "_on", lambda *args: got.append(real(*args)) or got[-1])
    before = list(values._kept.values())
    with values:
        torch.zeros(2, 4)[:, [1, 2]] = 1
    assert [id(x) for x in got] == [id(x) for x in before]


@pytest.mark.parametrize(("failures", "modes"), [(0, [0, 0]), (1, [0, 0, 1, 1]), (2, [0, 0, 1, 1])])
def test_only_a_body_that_was_refused_passes_through_values(monkeypatch, failures, modes):
    """A body runs, is captured, and where that fails runs and is captured again, with values."""
    seen, refused = [], []

    def body():
        seen.append(_get_current_function_mode_stack() != [])
        return torch.zeros(1)

    class Graph:
        def __init__(self, body, device):
            self.result = body()
            if len(refused) < failures:
                refused.append(device)
                raise RuntimeError("operation not permitted\nmore")

        def replay(self):
            pass

    monkeypatch.setattr(decode_steps, "capture", Graph)
    replayed = decode_steps.Replayed(torch.device("cpu"), captures=True)
    for _ in range(4):
        replayed(body)
    expected = [bool(x) for x in modes]
    assert seen[: len(expected)] == expected
    if failures < 2:
        assert (len(seen), replayed.error) == (len(expected), None)
        assert replayed.graph is not None
    else:  # the last steps run as they are
        assert replayed.error == "operation not permitted"
        assert seen[len(expected) :] == [False, False]
