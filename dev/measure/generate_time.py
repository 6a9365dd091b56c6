"""ms per token and to the first token of `generate` inside enable, 28 layers of 28/4 heads, random weights.

    PYTHONPATH=src python dev/measure/generate_time.py NAME

A line per batch, with its peak memory. PYTHONPATH says which duotone is timed: for another commit, that of
`git archive COMMIT src`, by turns.
"""

import json
import sys
import time
import warnings

import torch
import transformers

import duotone

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
config = transformers.Qwen2Config(
    vocab_size=32000,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=8192,
)
with torch.device("cuda"):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
with torch.no_grad():
    for p in model.parameters():
        if p.ndim > 1:
            p.normal_(0, 0.02)
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0
TOKENS, NEW = 2048, 161


def timed(ids: torch.Tensor, new: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    torch.cuda.synchronize()
    return time.perf_counter() - start


for batch in (1, 32):
    ids = torch.randint(1, 32000, (batch, TOKENS), device="cuda")
    for graphs in (True, False):
        with duotone.enable(model, duotone.scheme("kivi", bits=2), graphs=graphs):
            timed(ids, NEW)  # compiles, captures
            torch.cuda.reset_peak_memory_stats()
            first = sorted(timed(ids, 1) for _ in range(5))[2]
            whole = sorted(timed(ids, NEW) for _ in range(5))[2]
        ms = {"first_ms": first * 1e3, "ms_per_token": (whole - first) / (NEW - 1) * 1e3}
        peak = torch.cuda.max_memory_allocated() / 2**20
        row = {n: round(x, 3) for n, x in ms.items()} | {"peak_mib": round(peak)}
        print(
            json.dumps({"what": sys.argv[1], "batch": batch, "graphs": graphs, **row}), flush=True
        )
