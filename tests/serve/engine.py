"""vLLM's engine on a CPU, with the plug-in found by its entry point; `make test-vllm` has vLLM."""

import atexit
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "DUOTONE_SERVE_ON_CPU": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # V2 needs Triton
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ENTRY_POINTS = """[vllm.general_plugins]
duotone = duotone.serve.plugin:register
[vllm.platform_plugins]
duotone_on_cpu = serve_on_cpu:platform
"""


def install() -> None:
    """Let vLLM find the plug-in and the platform: entry points of a package in a folder."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    info = folder / "duotone_serve-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: duotone-serve\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    paths = [str(folder), str(Path(__file__).parent)]
    sys.path[:0] = paths
    os.environ.update(ENVIRONMENT)
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *sys.path])


def tiny_llama(folder: Path, head_dim: int = 64, kv_heads: int = 2, layers: int = 3) -> Path:
    """A folder with a Llama of random weights that says something else at each position."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def tiny_gemma(folder: Path) -> Path:
    """A folder with a Gemma 3 of random weights: two of three layers have a window of 48."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=48,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    Gemma3ForCausalLM(config).eval().save_pretrained(folder)
    return folder


def tiny_hybrid(folder: Path) -> Path:
    """A folder with a Qwen 3.5 of random weights: three of four layers keep states."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3_5ForCausalLM(config).eval().save_pretrained(folder)
    return folder


def tiny_lora(model: Path, folder: Path, rank: int = 8) -> tuple[Path, Path]:
    """A LoRA of random weights for Q and V of every layer, and the model with it merged."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    adapter, merged = folder / "adapter", folder / "merged"
    llama, tensors = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), {}
    for name, module in llama.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            out, into = module.weight.shape
            down, up = torch.randn(rank, into) * 0.1, torch.randn(out, rank) * 0.1
            module.weight.data += up @ down
            prefix = f"base_model.model.{name}"
            tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    llama.save_pretrained(merged)
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": str(model),
        "bias": "none",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter, merged


def changed(model: Path, folder: Path, **fields: Any) -> Path:
    """A copy of a model's folder whose configuration says something else."""
    shutil.copytree(model, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


@contextmanager
def engine(model: Path, dtype: str, **options: Any) -> Iterator[Any]:
    """`vllm.LLM` of a folder without a tokenizer."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    given = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "attention_backend": "CUSTOM",
        "max_model_len": 512,
        "dtype": "float32",
        "max_num_seqs": 4,
        "compilation_config": {"custom_ops": ["none"]},
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
    }
    try:
        llm = LLM(model=str(model), kv_cache_dtype=dtype, **given | options)
        yield llm
        llm.llm_engine.engine_core.shutdown()
    finally:
        cleanup_dist_env_and_memory()


def answers(
    llm: Any, prompts: list[list[int]], new: int, lora: Any = None, **options: Any
) -> list[list[int]]:
    """Greedy tokens after each prompt."""
    from vllm import SamplingParams

    given = {"max_tokens": new, "temperature": 0, "detokenize": False, "ignore_eos": True}
    found = llm.generate(
        [{"prompt_token_ids": p} for p in prompts],
        SamplingParams(**given | options),
        use_tqdm=False,
        lora_request=lora,
    )
    return [list(y.token_ids) for x in found for y in x.outputs]


def staggered(llm: Any, prompts: list[list[int]], new: int, gap: int = 3) -> list[list[int]]:
    """Greedy tokens after each prompt, which comes `gap` steps after the one before."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True)
    one, found, steps = llm.llm_engine, {}, 0
    left = [*enumerate(prompts)]
    while left or one.has_unfinished_requests():
        if left and steps % gap == 0:
            at, prompt = left.pop(0)
            one.add_request(str(at), {"prompt_token_ids": prompt}, params)
        ended = [x for x in one.step() if x.finished]
        found |= {x.request_id: list(x.outputs[0].token_ids) for x in ended}
        steps += 1
    return [found[str(at)] for at in range(len(prompts))]
