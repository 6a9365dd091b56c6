"""One door to the implementations: check the arguments, choose, run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from duotone.attention.choice import Choice, choose
from duotone.attention.cuda.kept_call import kept_call
from duotone.attention.reference import attend
from duotone.attention.triton.family import no_triton
from duotone.cache.segments import Segment
from duotone.quant.autocast import without_autocast
from duotone.tools.slow_paths import SlowPaths

IMPLEMENTATIONS = ("auto", "reference", "triton", "cuda")


def decode_attention(
    query: Tensor,
    kv: Sequence[Segment],
    *,
    sm_scale: float,
    tau: tuple[float, float] | None = None,
    impl: Literal["auto", "reference", "triton", "cuda"] = "auto",
    slow: SlowPaths | None = None,
) -> Tensor:
    """Attention of one new token per sequence over a cache's segments.

    query: [batch, q_heads, 1, head_dim], post-RoPE. kv: segments of the same batch and kv_heads.
    sm_scale: factor on q . k. tau: calibration of visual scores (CalibQuant eq. 7), or None.
    impl: "reference" is plain torch and runs everywhere; "triton" needs a CUDA device (or
        TRITON_INTERPRET=1); "cuda" needs compute capability 8.0, cuda-core, and a segment whose
        codes are in records (`QuantizedCache` on such a device) or belong to short spans; "auto"
        takes the first of cuda, triton and reference that can run the call.
    slow: receives what "auto" and "cuda" do not run by the CUDA kernels, and why; or None.
    Returns [batch, q_heads, 1, value_dim] in the dtype of `query`.
    Errors: ValueError for shapes that do not fit and for an implementation that cannot do this.
    """
    with without_autocast(query.device):
        if impl in ("auto", "cuda"):
            kept = kept_call(query, kv, sm_scale, tau)
            if kept is not None:
                return kept()
        _check(query, kv, impl)
        return _run(query, kv, sm_scale, tau, impl, slow)


def _run(
    query: Tensor,
    kv: Sequence[Segment],
    sm_scale: float,
    tau: tuple[float, float] | None,
    impl: str,
    slow: SlowPaths | None,
) -> Tensor:
    choice = _choice(query, kv, tau, impl)
    some = choice.impl == "cuda"
    for reason in choice.reasons if slow is not None else ():
        what = "decode attention of some tokens" if some else "decode attention"
        slow.say(what, "triton" if some else choice.impl, reason)
    if some:
        from duotone.attention.cuda.decode import attend_records

        return attend_records(query, choice.read, choice.others, sm_scale=sm_scale, tau=tau)
    kv = [segment.canonical() for segment in kv]
    if choice.impl == "reference":
        return attend(query, kv, sm_scale=sm_scale, tau=tau)
    if reason := no_triton(query.device):
        raise ValueError(f"impl='triton' is not possible: {reason}. Use impl='auto'.")
    from duotone.attention.triton.decode import decode_attention_triton

    return decode_attention_triton(query, kv, sm_scale=sm_scale, tau=tau)


def _choice(
    query: Tensor, kv: Sequence[Segment], tau: tuple[float, float] | None, impl: str
) -> Choice:
    if impl in ("reference", "triton") or (impl == "auto" and not on_gpu(query)):
        return Choice("reference" if impl == "auto" else impl)
    choice = choose(query, kv, tau)
    if impl == "cuda" and choice.impl != "cuda":
        raise ValueError(f"{choice.against}. Use impl='auto', 'triton' or 'reference'.")
    return choice


def on_gpu(query: Tensor) -> bool:
    """There are kernels for where `query` is; elsewhere the reference is what one expects."""
    return query.is_cuda


def _check(query: Tensor, kv: Sequence[Segment], impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS}; got {impl!r}.")
    if query.dim() != 4 or query.shape[2] != 1:
        raise ValueError(
            f"query must be [batch, q_heads, 1, head_dim]; got {tuple(query.shape)}. "
            "Several queries per sequence: duotone.attention.attend."
        )
    if not kv:
        raise ValueError("kv must hold at least one segment; got none. Prefill the cache first.")
    for segment in kv:
        _check_segment(query, segment)
    value_dims = {segment.head_dims[1] for segment in kv}
    if len(value_dims) > 1:
        raise ValueError(f"all segments must share one value_dim; got {sorted(value_dims)}.")


def _check_segment(query: Tensor, segment: Segment) -> None:
    (batch, heads), (head_dim, _) = segment.heads, segment.head_dims
    fits = batch == query.shape[0] and head_dim == query.shape[3] and not query.shape[1] % heads
    if not fits:
        raise ValueError(
            "batch and head_dim of query and segments must agree and q_heads be a multiple of "
            f"kv_heads; got query {tuple(query.shape)} and a segment of batch {batch}, "
            f"kv_heads {heads}, head_dim {head_dim}."
        )
