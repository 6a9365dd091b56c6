"""Codecs that no cache of `duotone` has: K and V change where a model makes them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from benchmarks.stress import attentions
from duotone.hf.model.facts import model_facts

Change = Callable[[int, str, Tensor], Tensor]


@contextmanager
def changing(model: Any, change: Change) -> Iterator[None]:
    """Pass K before rotary positions, and V, of packed layers through `change`.

    change: receives (layer, "key" or "value", [batch, tokens, kv_heads, head_dim]).
    """
    packed, shape = model_facts(model).packed, model_facts(model).shape

    def hook(layer: int, which: str) -> Callable:
        def run(module: nn.Module, given: tuple, out: Tensor) -> Tensor:
            if out.dim() == 3:
                x = out.unflatten(-1, (shape.kv_heads, -1))
                return change(layer, which, x).flatten(2)
            heads_first = out.shape[1] == shape.kv_heads
            x = out.transpose(1, 2) if heads_first else out
            x = change(layer, which, x)
            return x.transpose(1, 2) if heads_first else x

        return run

    with ExitStack() as stack:
        for attention in attentions(model):
            layer = attention.layer_idx
            if layer in packed:
                keys = getattr(attention, "k_norm", attention.k_proj)
                for module, which in ((keys, "key"), (attention.v_proj, "value")):
                    handle = module.register_forward_hook(hook(layer, which))
                    stack.callback(handle.remove)
        yield


@dataclass
class LayerInputs:
    """Hidden states that enter each layer, kept in one call and given again in another."""

    layers: nn.ModuleList
    states: dict[int, Tensor] = field(default_factory=dict)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the inputs of the calls inside the block."""

        def keep(number: int, given: tuple) -> None:
            self.states[number] = given[0]

        with self._hooked(keep):
            yield

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Give the kept inputs to the calls inside the block."""
        with self._hooked(lambda number, given: (self.states[number], *given[1:])):
            yield

    @contextmanager
    def _hooked(self, run: Callable[[int, tuple], Any]) -> Iterator[None]:
        def hook(number: int) -> Callable:
            return lambda module, given: run(number, given)

        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                stack.callback(layer.register_forward_pre_hook(hook(number)).remove)
            yield
