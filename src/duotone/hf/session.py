"""`enable`: one context manager around `model.generate`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from duotone.cache import MemoryReport
from duotone.hf.attachment import Attachment
from duotone.hf.cache import QuantizedCache
from duotone.hf.calibrated import check_bases
from duotone.hf.facts import check_spec, model_facts
from duotone.quant import CacheSpec


class Session:
    """What `enable` yields: the cache of the last `generate` call and its memory."""

    def __init__(self) -> None:
        self.cache: QuantizedCache | None = None

    def memory(self) -> MemoryReport:
        """Memory of the last `generate` call. Errors: ValueError before the first one."""
        if self.cache is None:
            raise ValueError("no cache yet; call model.generate inside the block first.")
        return self.cache.memory()


@contextmanager
def enable(
    model: PreTrainedModel,
    spec: CacheSpec,
    *,
    visual_mask: Tensor | None = None,
    impl: str = "auto",
) -> Iterator[Session]:
    """Inside the block, `model.generate` uses a fresh `QuantizedCache(model, spec)` per call.

    A cache passed as `past_key_values` and `use_cache=False` still win. One model instance is
    changed, and restored on exit, also after an exception.
    Errors: ValueError for an unsupported model or combination, before any work.
    """
    facts = model_facts(model)
    check_spec(facts, spec)
    check_bases(model, facts, spec)
    session = Session()
    caches: weakref.WeakSet[QuantizedCache] = weakref.WeakSet()
    attachment = Attachment.to(model)
    own = model.__dict__.get("generate")
    plain = model.generate

    @functools.wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is None and kwargs.get("use_cache", True):
            session.cache = QuantizedCache(model, spec, visual_mask=visual_mask, impl=impl)
            caches.add(session.cache)
            kwargs["past_key_values"] = session.cache
        return plain(*args, **kwargs)

    model.generate = generate  # type: ignore[method-assign]
    try:
        yield session
    finally:
        del model.generate
        if own is not None:
            model.generate = own  # type: ignore[method-assign]
        for cache in caches:
            cache.detach()
        attachment.release()
