"""`enable`: one context manager around `model.generate`."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duotone.cache import MemoryReport
from duotone.hf.attachment import Attachment, current_call
from duotone.hf.cache.attention import attach
from duotone.hf.cache.cache import QuantizedCache
from duotone.hf.graphs.decode_call import DecodeCall, is_method
from duotone.hf.graphs.kept_steps import KeptSteps
from duotone.hf.model.cache_argument import CACHE, NAMES, given_cache
from duotone.hf.model.copies import copied_method
from duotone.hf.model.facts import visual_token_ids
from duotone.hf.model.fitting import fitting_facts
from duotone.hf.model.implementation import planned_layers
from duotone.hf.model.speaker import handed_on, speaker_of
from duotone.hf.recommended import recommend, say_once
from duotone.quant import CacheSpec

PREPARE = "prepare_inputs_for_generation"


class Session:
    """Handle that `enable` yields: the cache of the last `generate` call and its memory."""

    def __init__(
        self,
        spec: CacheSpec,
        visual_mask: Tensor | None,
        impl: str,
        graphs: bool,
        kept: KeptSteps,
        model: PreTrainedModel,
    ) -> None:
        self._model = weakref.ref(model)
        self.cache: QuantizedCache | None = None
        self._spec, self._visual_mask, self._impl = spec, visual_mask, impl
        self._graphs, self._kept = graphs, kept
        self._caches: weakref.WeakSet[QuantizedCache] = weakref.WeakSet()
        self._thread = threading.get_ident()

    def memory(self) -> MemoryReport:
        """Memory of the last `generate` call. Errors: ValueError before the first one."""
        if self.cache is None:
            raise ValueError(
                "no cache yet; call model.generate inside the block first, with use_cache."
            )
        return self.cache.memory()

    def graph_bytes(self) -> int:
        """Bytes that captured decode steps hold, with all buffers that they are for.

        Buffers of the last call's cache are among them, and in `memory()`, too. They live as long
        as the model, for later blocks as well.
        """
        return self._kept.nbytes

    def free_graphs(self) -> None:
        """Free captured decode steps and the buffers that wait for a later call."""
        self._kept.forget()

    def _with_cache(self, model: PreTrainedModel, args: tuple, kwargs: dict) -> dict[str, Any]:
        """The arguments of `generate` with a fresh cache, unless they ask for none."""
        if given_cache(kwargs) is not None or _asked("use_cache", args, kwargs) is False:
            return kwargs
        _check_implementation(_asked("cache_implementation", args, kwargs))
        _check_width(self._visual_mask, args, kwargs)
        whole, mask = self._model(), self._visual_mask
        if mask is None and whole is not model:
            mask = handed_on(visual_token_ids(whole.config), kwargs)
        self.cache = QuantizedCache(whole, self._spec, visual_mask=mask, impl=self._impl)
        self._caches.add(self.cache)
        # What the model's own generation config says of caches gives way: a cache that is given
        # but not used would be read as if it held other tokens.
        own = model.generation_config
        kwargs = {name: value for name, value in kwargs.items() if name not in NAMES}
        kwargs[CACHE] = self.cache
        if own.use_cache is False:
            kwargs["use_cache"] = True
        if own.cache_implementation is not None:
            kwargs["cache_implementation"] = None
        return kwargs

    def _running(
        self, model: PreTrainedModel, enabled: _Enabled, args: tuple, kwargs: dict
    ) -> AbstractContextManager[None]:
        """The context that one `generate` call runs in."""
        own = model.generation_config
        new = _asked("max_new_tokens", args, kwargs) or own.max_new_tokens
        most = _asked("max_length", args, kwargs) or own.max_length
        forward, ours = enabled.plain(model, "forward"), enabled.ours["forward"]
        return DecodeCall(model, forward, ours, new, most, self._kept, self._graphs).running()

    def _detach(self) -> None:
        for cache in self._caches:
            cache.detach()


class _Enabled:
    """A model's open sessions, and the methods that it had of its own before the first."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.ours = {
            "generate": _generate(type(model).generate),
            "forward": _forward(type(model).forward),
            PREPARE: _prepare(getattr(type(model), PREPARE)),
        }
        # A shallow copy that was made inside a block brings ours along.
        self.own = {
            name: own
            for name, ours in self.ours.items()
            if (own := model.__dict__.get(name)) is not None and not is_method(model, name, ours)
        }
        self.sessions: list[Session] = []

    def install(self, model: PreTrainedModel) -> None:
        """Put our methods in the place of the model's."""
        for name, ours in self.ours.items():
            setattr(model, name, types.MethodType(ours, model))

    def remove(self, model: PreTrainedModel) -> None:
        """Give the model back the methods that it had; one that was set meanwhile stays."""
        for name, ours in self.ours.items():
            if is_method(model, name, ours):
                delattr(model, name)
                if name in self.own:
                    setattr(model, name, self.own[name])

    def plain(self, model: PreTrainedModel, name: str) -> Callable:
        """The model's method without us."""
        return self.own.get(name) or types.MethodType(getattr(type(model), name), model)

    def clean(self, clone: PreTrainedModel, memo: dict[int, Any]) -> None:
        """Give a deep copy the methods that the model had."""
        for name in self.ours:
            clone.__dict__.pop(name, None)
            copied = name in self.own and copied_method(self.own[name], clone, memo)
            if copied:
                setattr(clone, name, copied)

    def current(self) -> Session:
        """The last one that this thread opened, else the last one of all.

        Threads may so enable schemes of their own, or run `generate` of a block around them.
        """
        mine = [s for s in self.sessions if s._thread == threading.get_ident()]
        return (mine or self.sessions)[-1]


_ENABLED: weakref.WeakKeyDictionary[PreTrainedModel, _Enabled] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


@contextmanager
def enable(
    model: PreTrainedModel,
    spec: CacheSpec | None = None,
    *,
    visual_mask: Tensor | None = None,
    impl: str = "auto",
    graphs: bool = True,
) -> Iterator[Session]:
    """Inside the block, `model.generate` uses a fresh `QuantizedCache(model, spec)` per call.

    spec: None takes that of `duotone.recommend`, and says so on stderr, once per model type.

    A cache that a call is given, and its `use_cache=False`, still win. One model instance
    is changed, and restored on exit, also after an exception. Of nested blocks the inner one
    counts, of blocks in several threads each thread's own.
    visual_mask: [batch, tokens] of the prompt, as `QuantizedCache` has it.
    graphs: on CUDA, `generate` replays its decode steps as one CUDA graph where it can
        (`hf.graphs.decode_call`); False: it never does.
    Errors: ValueError for an unsupported model or combination, before any work.
    """
    chosen = recommend(model, visual_mask=visual_mask) if spec is None else None
    spec = spec if chosen is None else chosen.spec
    facts = fitting_facts(model, spec, visual_mask)
    planned_layers(model, facts, spec, impl)
    if not model.can_generate():
        raise ValueError(
            f"enable changes model.generate; {type(model).__name__} has none. Give the model with "
            "its language head, or pass a QuantizedCache to the forward pass."
        )
    speaker = speaker_of(model)
    if not hasattr(type(speaker), PREPARE):
        raise ValueError(
            f"models that write token by token are supported; {model.config.model_type!r} has a "
            f"generate of another kind, without {PREPARE}. Use the model's own cache."
        )
    if chosen is not None:
        say_once(chosen, facts)
    session = Session(spec, visual_mask, impl, graphs, KeptSteps.of(speaker), model)
    attachment = attach(speaker)
    _open(speaker, session, attachment)
    try:
        yield session
    finally:
        try:
            _close(speaker, session, attachment)
        finally:
            session._detach()
            attachment.release()


def is_enabled(model: PreTrainedModel) -> bool:
    """True inside of `enable`, where `generate` makes few-bit caches."""
    return speaker_of(model) in _ENABLED


def _open(model: PreTrainedModel, session: Session, attachment: Attachment) -> None:
    with _LOCK:
        if model not in _ENABLED:
            enabled = _ENABLED[model] = _Enabled(model)
            attachment.cleaners.append(enabled.clean)
            enabled.install(model)
        _ENABLED[model].sessions.append(session)


def _close(model: PreTrainedModel, session: Session, attachment: Attachment) -> None:
    with _LOCK:
        enabled = _ENABLED[model]
        enabled.sessions.remove(session)
        if enabled.sessions:
            return
        del _ENABLED[model]
        enabled.remove(model)
        attachment.cleaners.remove(enabled.clean)


@functools.cache
def _generate(plain: Callable) -> Callable:
    """`generate` of a class, which looks for the model's sessions."""

    @functools.wraps(plain)
    def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        with _LOCK:
            enabled = _ENABLED.get(model)
            current = None if enabled is None else enabled.current()
        if current is None:  # a shallow copy that was made inside a block
            return plain(model, *args, **kwargs)
        kwargs = current._with_cache(model, args, kwargs)
        with current._running(model, enabled, args, kwargs):
            return enabled.plain(model, "generate")(*args, **kwargs)

    return generate


@functools.cache
def _forward(plain: Callable) -> Callable:
    """Forward pass of a class, which hands over the steps that a `generate` call has claimed."""

    @functools.wraps(plain)
    def forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        call = None if torch.compiler.is_compiling() else current_call()
        if call is not None and call.model is model and call.claimed:
            return call.step(kwargs)
        enabled = _ENABLED.get(model)
        own = None if enabled is None else enabled.own.get("forward")
        return plain(model, *args, **kwargs) if own is None else own(*args, **kwargs)

    return forward


@functools.cache
def _prepare(plain: Callable) -> Callable:
    """Inputs of a step in a class, with the call's cache where a model begins without one."""

    @functools.wraps(plain)
    def prepare(model: PreTrainedModel, *args: Any, **kwargs: Any) -> dict[str, Any]:
        enabled = _ENABLED.get(model)
        own = None if enabled is None else enabled.own.get(PREPARE)
        inputs = plain(model, *args, **kwargs) if own is None else own(*args, **kwargs)
        cache = given_cache(kwargs)
        if isinstance(cache, QuantizedCache) and given_cache(inputs) is None:
            known = args[0] if args else kwargs["input_ids"]
            _check_whole_prompt(model, known, inputs.get("input_ids"))
            cache.reset()
            inputs[CACHE] = cache
        return inputs

    return prepare


def _check_whole_prompt(model: PreTrainedModel, known: Tensor, ids: Tensor | None) -> None:
    """Raise ValueError for a model that begins anew without the tokens so far (Phi-4, 5.23)."""
    if ids is None or ids.shape[1] == known.shape[1]:
        return
    limit = getattr(model.config, "original_max_position_embeddings", None)
    raise ValueError(
        f"a model that begins a new cache must read all tokens again; {model.config.model_type!r} "
        f"reads {ids.shape[1]} of {known.shape[1]}, and forgets the rest with its own cache, too. "
        f"Keep prompt and answer on one side of its original_max_position_embeddings, {limit}."
    )


def _asked(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Setting of the generation config in the call itself; None where it is not given."""
    if kwargs.get(name) is not None:
        return kwargs[name]
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    return getattr(given, name, None)


def _check_implementation(name: str | None) -> None:
    # "hybrid" is in many configs on the hub; transformers takes it for None.
    if name not in (None, "hybrid"):
        raise ValueError(
            "inside duotone.enable, generate uses duotone's cache; got "
            f"cache_implementation={name!r}. Leave it out: on CUDA, decode steps run in fixed "
            "buffers anyway, as CUDA graphs."
        )


def _check_width(mask: Tensor | None, args: tuple, kwargs: dict[str, Any]) -> None:
    """A mask of another width would mark other tokens."""
    given = [kwargs.get(name) for name in ("inputs_embeds", "input_ids", "inputs")] + [*args[:1]]
    prompt = next((tensor for tensor in given if tensor is not None), None)
    if mask is not None and prompt is not None and prompt.shape[1] != mask.shape[1]:
        raise ValueError(
            f"visual_mask must cover the prompt, {prompt.shape[1]} tokens with padding; got "
            f"{tuple(mask.shape)}. Make it of the same input_ids."
        )
