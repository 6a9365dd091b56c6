"""Entry point of vLLM (`vllm.general_plugins`): cache dtypes, and the backend that serves them."""

from __future__ import annotations

from importlib.metadata import version

# Cache dtypes by the bits of K and V.
DTYPES = {"duotone_2bit": 2, "duotone_4bit": 4}
# The minor version whose contract `backend` keeps.
VLLM = "0.33"
BACKEND = "duotone.serve.backend.DuotoneBackend"


def register() -> None:
    """Register dtypes and backend; vLLM calls this in each of its processes, and again.

    Errors: RuntimeError for another minor version of vLLM.
    """
    found = version("vllm")
    if not found.startswith(VLLM + "."):
        raise RuntimeError(
            f"duotone serves in vLLM {VLLM}; got {found}. Install vllm=={VLLM}.*, or set "
            "VLLM_PLUGINS to the plug-ins you want without duotone."
        )
    import torch
    from vllm.config.cache import KV_CACHE_DTYPES, register_kv_cache_dtype
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        """Bytes that the backend alone reads."""

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> KVQuantMode:
            return KVQuantMode.CUSTOM

    for name in DTYPES:
        if name not in KV_CACHE_DTYPES:
            register_kv_cache_dtype(name)(type(f"Handler_{name}", (Handler,), {"name": name}))
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
