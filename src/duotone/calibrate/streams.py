"""The residual stream of a layer, heard on its way: what its MLP adds to it after attention.

No family's names are needed. After its attention a layer makes a sum and gives it to one of its
children, a norm or the MLP: that is the stream. Tensors that a child made are none. Such are the
outputs of attention, of a norm after it, and of a norm that a parallel MLP shares with attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

Stream = Float[Tensor, "batch tokens hidden"]
Heard = Callable[[int, Stream, Stream], None]


@contextmanager
def hearing(model: Any, layers: Iterable[int], heard: Heard) -> Iterator[None]:
    """Pass the streams of a language model's layers to `heard` while they run.

    heard: receives (layer_idx, stream after attention, the layer's output) of each call. Layers
    without an MLP after their attention are not heard. Undone at the end, come what may.
    """
    wanted = set(layers)
    with ExitStack() as stack:
        for layer in decoder_layers(model):
            attention, number = attention_of(layer)
            if number in wanted:
                _Layer(attention, number, heard).listen(layer, stack)
        yield


def decoder_layers(model: Any) -> list[nn.Module]:
    """Layers of the language model that hold an attention: items of its outermost lists."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if not isinstance(child, nn.ModuleList):
                visit(child)
            else:
                found.extend(item for item in child if attention_of(item)[0] is not None)

    visit(model.get_decoder())
    return found


def attention_of(layer: nn.Module) -> tuple[nn.Module | None, int | None]:
    """(the child that is a layer's attention or holds it, layer_idx); Nones without one."""
    for child in layer.children():
        for module in child.modules():
            number = getattr(module, "layer_idx", None)
            if isinstance(number, int):
                return child, number
    return None, None


class _Layer:
    """Hooks on one layer. made: tensors of this call that the layer did not make itself."""

    def __init__(self, attention: nn.Module, number: int, heard: Heard) -> None:
        self.attention, self.number, self.heard = attention, number, heard
        self.made: list[Tensor] = []
        self.attended = False
        self.stream: Tensor | None = None

    def listen(self, layer: nn.Module, stack: ExitStack) -> None:
        """Hook the layer and its children until the stack ends."""
        hooks = [
            layer.register_forward_pre_hook(self._begin, with_kwargs=True),
            layer.register_forward_hook(self._end),
        ]
        for child in layer.children():
            hooks.append(child.register_forward_pre_hook(self._given, with_kwargs=True))
            hooks.append(child.register_forward_hook(self._done))
        for hook in hooks:
            stack.callback(hook.remove)

    def _begin(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        self.made, self.attended, self.stream = _tensors((args, kwargs)), False, None

    def _given(self, child: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self.attended or self.stream is not None:
            return
        for x in _tensors((args, kwargs)):
            if x.shape == self.made[0].shape and not any(x is other for other in self.made):
                self.stream = x
                return

    def _done(self, child: nn.Module, args: tuple, out: Any) -> None:
        self.made += _tensors(out)
        self.attended |= child is self.attention

    def _end(self, layer: nn.Module, args: tuple, out: Any) -> None:
        stream, output = self.stream, next(iter(_tensors(out)), None)
        self.made, self.stream = [], None
        if stream is not None and output is not None and output.shape == stream.shape:
            self.heard(self.number, stream, output)


def _tensors(x: Any) -> list[Tensor]:
    """Tensors of nested tuples and dicts, in order."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = tuple(x.values())
    return [one for each in x for one in _tensors(each)] if isinstance(x, (tuple, list)) else []
