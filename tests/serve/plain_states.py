"""Gated delta rule of vLLM's Qwen 3.5 in plain torch and any float type, for tests on a CPU.

vLLM's own for CPUs are kernels in bfloat16.
"""

import torch
from torch.nn.functional import conv1d, normalize, silu, softplus
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name


def install() -> None:
    """Let vLLM register this operation in place of its own."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    gdn_attention.cpu_gdn_attention_core = cpu_gdn_attention_core


def cpu_gdn_attention_core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Every request by itself, token by token."""
    context, name = get_forward_context(), _resolve_layer_name(layer_name)
    layer = context.no_compile_layers[name]
    if context.attn_metadata is None:
        return
    given = context.attn_metadata[layer.prefix]
    starts = given.non_spec_query_start_loc.tolist()
    slots = given.non_spec_state_indices_tensor
    slots = (slots if slots.dim() == 1 else slots[:, 0]).tolist()
    begun = [True] * given.num_decodes
    if given.num_prefills:
        begun = given.has_initial_state.tolist()
    for row in range(given.num_decodes + given.num_prefills):
        part = slice(starts[row], starts[row + 1])
        conv, state = (x[slots[row]] for x in layer.kv_cache)
        if not begun[row]:
            conv.zero_()
            state.zero_()
        core_attn_out[part] = _request(layer, conv, state, mixed_qkv[part], b[part], a[part])


def _request(layer, conv, state, mixed, b, a):
    """conv: [width - 1, channels], state: [H, Dv, Dk], both changed in place."""
    weight = layer.conv1d.weight
    taps = weight.shape[-1]
    if conv.shape[0] != taps - 1:
        conv = conv.transpose(0, 1)
    seen = torch.cat([conv.to(mixed.dtype), mixed])
    conv.copy_(seen[-(taps - 1) :])
    moved = silu(conv1d(seen.T[None], weight.view(-1, 1, taps), groups=len(weight))[0].T)
    query, key, value = (x[0] for x in layer.rearrange_mixed_qkv(moved))
    heads = value.shape[1] // query.shape[1]
    query, key = (
        normalize(x.float(), dim=-1, eps=1e-6).repeat_interleave(heads, 1) for x in (query, key)
    )
    decay = (-layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias.float())).exp()
    beta, out, now = b.float().sigmoid(), [], state.float()
    for t in range(len(mixed)):
        now = now * decay[t][:, None, None]
        change = (value[t].float() - torch.einsum("hvk,hk->hv", now, key[t])) * beta[t][:, None]
        now = now + torch.einsum("hv,hk->hvk", change, key[t])
        out.append(torch.einsum("hvk,hk->hv", now, query[t]) * key.shape[-1] ** -0.5)
    state.copy_(now)
    return torch.stack(out).to(mixed.dtype)
