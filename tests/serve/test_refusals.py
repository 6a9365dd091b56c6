"""Models and options that the plug-in refuses at start, each with its reason; `make test-vllm`."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

from engine import engine, install, tiny_hybrid  # noqa: E402

install()  # before vLLM looks for platforms

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "layer_types": ["full_attention", "full_attention"],
    "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 64,
}
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "layer_types": ["full_attention", "full_attention"],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 2,
}
LLAMA_4 = LLAMA | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 128,
    "interleave_moe_layer_step": 0,
    "moe_layers": [],
    "attention_chunk_size": 64,
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "head_dim 80": (LLAMA | {"head_dim": 80}, {}, "head_dim|head_size"),
    "head_dim 512": (LLAMA | {"head_dim": 512}, {}, "head_dim|head_size"),
    "soft caps": (GEMMA, {}, "a soft cap of logits"),
    "sinks": (GPT_OSS, {}, "attention sinks not supported"),
    "MLA": (DEEPSEEK, {}, "MLA"),
    "chunks": (LLAMA_4, {}, "got ChunkedLocalAttention"),
    "chunks, skipped": (
        LLAMA_4,
        {"kv_cache_dtype_skip_layers": ["0", "1", "2"]},
        "got ChunkedLocalAttention",
    ),
    "no cache dtype": (LLAMA, {"kv_cache_dtype": "auto"}, "duotone_4bit; got auto"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    config, options, reason = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {"load_format": "dummy", "block_size": None, **options}
    dtype = given.pop("kv_cache_dtype", "duotone_2bit")
    with pytest.raises(Exception, match=reason), engine(tmp_path, dtype, **given):
        pass


def test_prefix_caching_of_hybrid_models_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")  # of vLLM's Qwen 3.5
    model, given = tiny_hybrid(tmp_path), {"block_size": None, "enable_prefix_caching": True}
    refused = pytest.raises(Exception, match="--no-enable-prefix-caching")
    with refused, engine(model, "duotone_2bit", **given):
        pass
