"""A call of launches is made once by Python, then repeated for other tensors."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from duotone import recorded
from duotone.recorded import RecordedCall, Scratch, recording, spoil


class Arguments(ctypes.Structure):
    _fields_ = (("n", ctypes.c_int), ("x", ctypes.c_void_p), ("y", ctypes.c_void_p * 2))


class Launch:
    """out = x * n + y on the CPU, by addresses alone, as a kernel would."""

    def __init__(self, arguments: Arguments, size: int) -> None:
        self.arguments, self.size, self.streams = arguments, size, []

    def __call__(self, stream: int) -> None:
        a = self.arguments
        x, y, out = (_at(address, self.size) for address in (a.x, a.y[0], a.y[1]))
        for i in range(self.size):
            out[i] = x[i] * a.n + y[i]
        self.streams.append(stream)


def _at(address: int, size: int) -> ctypes.Array:
    return (ctypes.c_float * size).from_address(address)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def launch(n: int, x: Tensor, y: Tensor, out: Tensor) -> None:
    """Make a launch as `nvrtc.Kernel` does."""
    addresses = (ctypes.c_void_p * 2)(y.data_ptr(), out.data_ptr())
    made = Launch(Arguments(n=n, x=x.data_ptr(), y=addresses), x.numel())
    made(0)
    if recording() is not None:
        recording().launches.append(made)


class Body:
    """Two launches through a tensor between them: (x * 3 + y) * 5 + y."""

    def __init__(self, also: Callable[[Tensor], object] = lambda x: None) -> None:
        self.also, self.runs = also, 0

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.runs += 1
        between, out = x.new_empty(x.shape), torch.empty_like(x)
        self.also(x)
        launch(3, x, y, between)
        launch(5, between, y, out)
        return out


def pair(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randint(-9, 9, (size,)).float(), torch.randint(-9, 9, (size,)).float()


def test_a_repeated_call_reads_and_writes_other_tensors() -> None:
    call, body, results = RecordedCall(Scratch()), Body(), []
    inputs = [pair() for _ in range(4)]
    results = [call(body, *given) for given in inputs]
    assert body.runs == 1
    assert call.is_recorded
    for (x, y), result in zip(inputs, results, strict=True):
        assert torch.equal(result, (x * 3 + y) * 5 + y)


def test_launches_go_to_the_current_stream() -> None:
    call, body = RecordedCall(Scratch()), Body()
    call(body, *pair())
    call(body, *pair())
    assert [made.streams for made in call._launches] == [[0, 77]] * 2


@pytest.mark.parametrize("change", ["size", "stride", "alignment", "determinism"])
def test_another_kind_of_call_is_made_as_ever(change: str) -> None:
    call, body = RecordedCall(Scratch()), Body()
    call(body, *pair())
    x, y = pair(16 if change == "size" else 8)
    if change == "alignment":
        x = torch.cat([x, x])[1:9]
    if change == "stride":
        x, y = x.view(4, 2), y.view(4, 2)
    torch.use_deterministic_algorithms(change == "determinism")
    try:
        assert torch.equal(call(body, x, y), (x * 3 + y) * 5 + y)
    finally:
        torch.use_deterministic_algorithms(False)
    assert body.runs == 2


@pytest.mark.parametrize(
    "also",
    [lambda x: x + 1, lambda x: torch.zeros(3), lambda x: x.copy_(x.clone()), lambda x: spoil()],
    ids=["computes", "fills", "copies", "says so"],
)
def test_a_call_that_does_more_than_launch_is_never_repeated(also: Callable) -> None:
    call, body = RecordedCall(Scratch()), Body(also)
    for runs in (1, 2, 3):
        x, y = pair()
        assert torch.equal(call(body, x, y), (x * 3 + y) * 5 + y)
        assert body.runs == runs
    assert not call.is_recorded


def test_looking_at_a_tensor_is_no_computation() -> None:
    call, body = RecordedCall(Scratch()), Body(lambda x: x.view(2, 4).transpose(0, 1)[:2, None])
    call(body, *pair())
    assert call.is_recorded


def test_a_result_that_is_not_new_is_not_repeated() -> None:
    held = torch.empty(8)

    def body(x: Tensor, y: Tensor) -> Tensor:
        launch(2, x, y, held)
        return held

    call = RecordedCall(Scratch())
    assert call(body, *pair()) is held
    assert not call.is_recorded


def test_calls_share_what_they_allocate() -> None:
    scratch = Scratch()
    calls = [RecordedCall(scratch) for _ in range(5)]
    body = Body()
    for call in calls:
        x, y = pair()
        assert torch.equal(call(body, x, y), (x * 3 + y) * 5 + y)
    assert scratch.nbytes == 2 * 8 * 4


def test_nothing_is_recorded_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    call, body = RecordedCall(Scratch()), Body()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call(body, *pair())
    assert not call.is_recorded
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call(body, *pair())
    assert call.is_recorded


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        raise ValueError("no")

    call = RecordedCall(Scratch())
    with pytest.raises(ValueError, match="no"):
        call(body, *pair())
    assert recorded.recording() is None
    assert not call.is_recorded
