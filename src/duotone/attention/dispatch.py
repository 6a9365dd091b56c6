"""One door to the implementations: check the arguments, choose, run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from duotone.attention.reference import attend
from duotone.cache.packed import PackedTensor
from duotone.cache.pair import Layouts
from duotone.cache.segments import PackedSegment, Segment
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.autocast import without_autocast
from duotone.recorded import spoil
from duotone.slow_paths import SlowPaths

# Dense tokens per sequence that no implementation takes long for.
FEW_TOKENS = 1024
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
        codes are in records (`QuantizedCache` on such a device); "auto" takes the first of cuda,
        triton and reference that can run the call.
    slow: hears what "auto" and "cuda" do not run by the CUDA kernels, and why; None: nobody does.
    Returns [batch, q_heads, 1, value_dim] in the dtype of `query`.
    Errors: ValueError for shapes that do not fit and for an implementation that cannot do this.
    """
    _check(query, kv, impl)
    with without_autocast(query.device):
        return _run(query, kv, sm_scale, tau, impl, slow)


def _run(
    query: Tensor,
    kv: Sequence[Segment],
    sm_scale: float,
    tau: tuple[float, float] | None,
    impl: str,
    slow: SlowPaths | None,
) -> Tensor:
    chosen = _choose(query, kv, tau, slow) if impl == "auto" else impl
    if chosen == "cuda":
        from duotone.attention.cuda import decode

        run = decode.attend_records if impl == "auto" else decode.decode_attention_cuda
        return run(query, kv, sm_scale=sm_scale, tau=tau, slow=slow)
    spoil()
    kv = [segment.canonical() for segment in kv]
    if chosen == "reference":
        return attend(query, kv, sm_scale=sm_scale, tau=tau)
    if reason := triton_reason(query.device):
        raise ValueError(f"impl='triton' is not possible: {reason}. Use impl='auto'.")
    from duotone.attention.triton.decode import decode_attention_triton

    return decode_attention_triton(query, kv, sm_scale=sm_scale, tau=tau)


def code_layouts(
    spec: CacheSpec, impl: str = "auto", device: torch.device | None = None
) -> Layouts:
    """How a cache on `device` lays out its packed stores for the kernels that `impl` may use.

    Errors: ValueError if impl="cuda" and the kernels can read none of what this spec packs, or do
    not run on this device.
    """
    if impl not in ("auto", "cuda") or device is None:
        return Layouts()
    from duotone.attention.cuda.groups.format import stream_reason
    from duotone.attention.cuda.groups.records import GroupLayout
    from duotone.attention.cuda.layouts import VisualLayout, visual_reason
    from duotone.attention.cuda.reasons import device_reason

    reason = device_reason(device, impl)
    reasons = {
        name: reason or (_reason(getattr(spec, name), name, ask))
        for name, ask in (
            ("visual", visual_reason),
            ("background", visual_reason),
            ("text", stream_reason),
        )
    }
    if all(reasons.values()) and impl == "cuda":
        why = reason or "; ".join(reasons.values())
        raise ValueError(f"impl='cuda' is not possible: {why}. Use impl='auto'.")
    made = {"visual": VisualLayout, "background": VisualLayout, "text": GroupLayout}
    return Layouts(*(None if reasons[name] else layout() for name, layout in made.items()))


def _reason(
    kv: object, name: str, ask: Callable[[TensorSpec, TensorSpec], str | None]
) -> str | None:
    if not isinstance(kv, KVSpec):
        return f"the CUDA kernels decode packed tokens; {name} is {kv!r}"
    return ask(kv.key, kv.value)


def _choose(
    query: Tensor,
    kv: Sequence[Segment],
    tau: tuple[float, float] | None,
    slow: SlowPaths | None = None,
) -> str:
    if not on_gpu(query):
        return "reference"
    from duotone.attention.cuda import decode

    reason = decode.unsupported(query, kv, tau)
    if reason is None:
        return "cuda"
    against = _against_triton(query, kv)
    chosen = "triton" if against is None else "reference"
    if slow is not None:
        for cause in (against,) if against else _why_not_cuda(query, kv, tau, reason):
            slow.say("decode attention", chosen, cause)
    return chosen


def triton_reason(device: torch.device) -> str | None:
    """Why Triton runs nothing on `device`, or None."""
    if find_spec("triton") is None:
        return "it needs Triton, which is not installed (duotone[triton])"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton needs a CUDA device or TRITON_INTERPRET=1; got a model on {device}"
    return None


def on_gpu(query: Tensor) -> bool:
    """There are kernels for where `query` is; elsewhere the reference is what one expects."""
    return query.is_cuda


def _against_triton(query: Tensor, kv: Sequence[Segment]) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed, and the CUDA kernels do not read this call"
    from duotone.attention.triton.decode import unsupported

    return unsupported(query, kv)


def _why_not_cuda(
    query: Tensor, kv: Sequence[Segment], tau: tuple[float, float] | None, reason: str
) -> list[str]:
    """Causes, of which `reason` may be a consequence: that no segment has records."""
    from duotone.attention.cuda.left_out import left_out
    from duotone.attention.cuda.reasons import NO_RECORDS, device_reason

    if reason != NO_RECORDS:
        return [reason]
    if untried := device_reason(query.device):
        return [untried]
    packed = [segment for segment in kv if isinstance(segment, PackedSegment)]
    if packed:
        return left_out(query, packed, tau)
    # Up to there every implementation takes the time of its launches.
    few = max(segment.tokens for segment in kv) <= FEW_TOKENS
    return [] if few else ["no token of this cache is packed (yet)"]


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


def _check_segment(query: Tensor, segment: Segment) -> None:
    key, (batch, heads) = segment.key, segment.heads
    head_dim = key.head_dim if isinstance(key, PackedTensor) else segment.head_dim
    fits = batch == query.shape[0] and head_dim == query.shape[3] and not query.shape[1] % heads
    if not fits:
        raise ValueError(
            "batch and head_dim of query and segments must agree and q_heads be a multiple of "
            f"kv_heads; got query {tuple(query.shape)} and a segment of batch {batch}, "
            f"kv_heads {heads}, head_dim {head_dim}."
        )
