"""vLLM's FlashAttention as `serve.windows.Attention`."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from duotone.serve.windows import Lengths


def flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: Lengths,
    tokens: Lengths,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of sequences in a row, as `windows.attention`, by the device's newest version.

    A query without a key may have lse +inf.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query,
        keys,
        values,
        max_seqlen_q=queries.longest,
        cu_seqlens_q=queries.ends,
        max_seqlen_k=tokens.longest,
        cu_seqlens_k=tokens.ends,
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
        fa_version=_version(query.shape[2]),
    )


@cache
def _version(head_dim: int) -> int:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return get_flash_attn_version(head_size=head_dim)
