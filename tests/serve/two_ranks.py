"""Answers of two ranks of an engine, in a process of its own: ranks are forked from it.

python two_ranks.py MODEL DTYPE NEW OPTIONS < prompts > answers
"""

import json
import os
import sys
from pathlib import Path

from engine import answers, engine, install

if __name__ == "__main__":
    model, dtype, new, options = sys.argv[1:]
    install()
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    # Two workers on one NUMA node.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    prompts, out = json.load(sys.stdin), os.dup(1)
    os.dup2(2, 1)  # the engine prints
    with engine(Path(model), dtype, tensor_parallel_size=2, **json.loads(options)) as llm:
        ranks = llm.llm_engine.vllm_config.parallel_config.world_size
        found = answers(llm, prompts, int(new))
    os.write(out, json.dumps({"ranks": ranks, "answers": found}).encode())
