"""Runs of a model up to one of its modules, for every batch of the calibration data.

Each unit is reached from the model's own entrance, or from its language model's. The language
model's arguments are kept after the vision tower has run. Families pass different masks, positions
and features to each layer, and only their own code knows which. Each layer costs half of all
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from duotone.loading import visual_mask
from duotone.weights.equivalences.module_map import at
from duotone.weights.methods.observer import Observer, Rows
from duotone.weights.modules.modality import Modality

from .calibration import Tensors


class _Reached(BaseException):
    """Signal that ends a forward pass; no Exception, so that no model's code catches it."""


@dataclass
class Runs:
    """A model with the batches it runs on.

    language: path of the language model. modality: of the quantized model in the making.
    impl: of its linears.
    """

    model: nn.Module
    batches: Sequence[Tensors]
    language: str
    modality: Modality
    impl: str = "auto"
    _entrances: list[tuple[tuple, dict]] = field(default_factory=list)

    def through_vision(self, path: str) -> Iterator[Rows]:
        """Run every batch up to the module at `path`; batches without pictures may not reach it.

        Yields each run's `Rows` before the run.
        """
        for batch in self.batches:
            yield Rows()
            with torch.no_grad(), self.modality.rows(None), _until(at(self.model, path)):
                self.model(**self._on_device(batch), use_cache=False)

    def through_language(self, path: str) -> Iterator[Rows]:
        """Run every batch from the language model's entrance, rows by modality, without padding."""
        self._enter()
        language = at(self.model, self.language)
        for batch, (args, kwargs) in zip(self.batches, self._entrances, strict=True):
            ids = batch["input_ids"].to(self.device)
            visual = visual_mask(self.model.config, ids)
            real = batch["attention_mask"].to(self.device).bool().flatten()
            yield Rows(real, visual.flatten())
            args, kwargs = self._on_device((args, kwargs))
            with torch.no_grad(), self.modality.rows(visual), _until(at(self.model, path)):
                language(*args, **kwargs)

    def through_model(self, path: str) -> Iterator[Rows]:
        """Run every batch up to the head at `path`, which does not run; rows of text count."""
        for batch in self.batches:
            ids, real = batch["input_ids"], batch["attention_mask"].bool()
            visual = visual_mask(self.model.config, ids)
            yield Rows((real & ~visual).flatten().to(self.device))
            head = at(self.model, path)
            given = visual.to(self.device)
            with torch.no_grad(), self._seeing(given), _caught(head, lambda _: None):
                self.model(**self._on_device(batch), use_cache=False)

    @contextmanager
    def _seeing(self, visual: Tensor) -> Iterator[None]:
        """Mark the visual tokens inside the language model, and none of the tower's."""
        language = at(self.model, self.language)

        def begin(*_: object) -> None:
            self.modality.set(visual)

        def end(*_: object) -> None:
            self.modality.set(None)

        hooks = (
            language.register_forward_pre_hook(begin),
            language.register_forward_hook(end),
        )
        try:
            with self.modality.rows(None):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def forget(self) -> None:
        """Drop the kept arguments: the language model's input has changed."""
        self._entrances.clear()

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def _enter(self) -> None:
        """Keep the language model's arguments, on the CPU."""
        if self._entrances:
            return
        for batch in self.batches:
            kept: list[tuple[tuple, dict]] = []
            language = at(self.model, self.language)
            with torch.no_grad(), self.modality.rows(None), _caught(language, kept.append):
                self.model(**self._on_device(batch), use_cache=False)
            self._entrances.append(_moved(kept[0], torch.device("cpu")))

    def _on_device(self, data: Any) -> Any:
        return _moved(data, self.device)


def observe(runs: Runs, observer: Observer, part: str, path: str) -> None:
    """Show all batches to an observer of linears of the module at `path`."""
    through = {"language": runs.through_language, "head": runs.through_model}
    with observer.watching():
        for rows in through.get(part, runs.through_vision)(path):
            observer.rows = rows


def _moved(data: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, data)


@contextmanager
def _until(module: nn.Module) -> Iterator[None]:
    """End a forward pass within the block when `module` has run."""

    def done(*_: object) -> None:
        raise _Reached

    yield from _ending(module.register_forward_hook(done))


@contextmanager
def _caught(module: nn.Module, keep: Callable[[tuple], None]) -> Iterator[None]:
    """End a forward pass within the block before `module` runs; `keep` gets its (args, kwargs)."""

    def caught(_: nn.Module, args: tuple, kwargs: dict) -> None:
        keep((args, kwargs))
        raise _Reached

    yield from _ending(module.register_forward_pre_hook(caught, with_kwargs=True))


def _ending(hook: Any) -> Iterator[None]:
    try:
        yield
    except _Reached:
        pass
    finally:
        hook.remove()
