"""A platform of vLLM's empty build that runs attention backends in plain torch on a CPU.

vLLM's own CPU platform refuses backends from outside, and its kernels are not in the empty build:
those that these tests need stand here.
"""

import os
from itertools import pairwise

import torch


def platform() -> str | None:
    """Entry point of `vllm.platform_plugins`: on where DUOTONE_SERVE_ON_CPU is set."""
    return "serve_on_cpu.CpuPlatform" if os.environ.get("DUOTONE_SERVE_ON_CPU") else None


def _slots(starts, positions, table, out, block_size) -> None:
    edges = starts.tolist()
    for row, (first, end) in enumerate(pairwise(edges)):
        at = positions[first:end]
        # Runner V1 asks for slots of rings as well, whose tables have one block.
        block = (at // block_size).clamp_max(table.shape[1] - 1)
        out[first:end] = table[row].long()[block] * block_size + at % block_size


def _drawn(logits, seeds):
    rows = []
    for row, seed in zip(logits, seeds.tolist(), strict=True):
        noise = torch.empty_like(row).exponential_(generator=torch.Generator().manual_seed(seed))
        rows.append((row - noise.log()).argmax())
    return torch.stack(rows)


def _define() -> None:
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, body in (
        ("init_cpu_memory_env(int[] n) -> ()", lambda n: None),
        (
            "compute_slot_mapping_kernel_impl"
            "(Tensor q, Tensor p, Tensor bt, Tensor(a!) out, int bs) -> ()",
            _slots,
        ),
        ("greedy_argmax(Tensor l) -> Tensor", lambda logits: logits.argmax(-1)),
        ("fused_gumbel_argmax(Tensor l, Tensor seeds) -> Tensor", _drawn),
    ):
        library.define(schema)
        library.impl(schema.split("(")[0], body, "CompositeExplicitAutograd")
    _define.library = library  # definitions end with it


if os.environ.get("DUOTONE_SERVE_ON_CPU"):
    from vllm.platforms.cpu import CpuPlatform as _Platform

    _define()

    class CpuPlatform(_Platform):
        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            if selected_backend is None:
                return "plain_attention.Plain"
            # As on a GPU: a backend says by itself why it does not serve a layer.
            reasons = selected_backend.get_class().validate_configuration(
                device_capability=None, **attn_selector_config._asdict()
            )
            if reasons:
                raise ValueError(f"{selected_backend} is not valid. Reason: {reasons}")
            return selected_backend.get_path()

        @classmethod
        def update_block_size_for_backend(cls, vllm_config) -> None:
            # As on a GPU: the CPU's own knows no skipped layers.
            super(_Platform, cls).update_block_size_for_backend(vllm_config)

        @classmethod
        def check_and_update_config(cls, vllm_config) -> None:
            super().check_and_update_config(vllm_config)
            if vllm_config.parallel_config.world_size == 1:
                vllm_config.parallel_config.distributed_executor_backend = "uni"

        @classmethod
        def check_runner_kv_caches_multi_layer(cls) -> None:
            pass

        @classmethod
        def import_kernels(cls) -> None:
            pass
