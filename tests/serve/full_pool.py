"""Answers about documents from a full pool, in a process of its own.

vLLM changes transformers' classes where it serves by them, so others in the process would fail.

python full_pool.py FOLDER > answers
"""

import json
import os
import sys
from pathlib import Path

from engine import engine, install

BLOCKS, DOCUMENTS = 52, 8
OPTIONS = {
    "skip_tokenizer_init": False,
    "model_impl": "transformers",
    "block_size": None,
    "limit_mm_per_prompt": {"image": 1},
    "num_gpu_blocks_override": BLOCKS,
}


def main() -> None:
    """Ask two questions about each document, free and then guided; print answers and counts."""
    out = os.dup(1)
    os.dup2(2, 1)  # the engine prints
    install()
    from exact import poisoned_pages, watched
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from benchmarks.serve.served_tiny import prompt_of, served_tiny
    from duotone.tasks.synthetic.documents import generate
    from duotone.tasks.synthetic.sample import HELD_OUT_SEEDS

    documents = [generate(HELD_OUT_SEEDS[at]) for at in range(DOCUMENTS)]
    asked = [(x.images, turn) for x in documents for turn in x.of_kind("field")[:2]]
    prompts = [
        {"prompt": prompt_of(turn.question), "multi_modal_data": {"image": [*images]}}
        for images, turn in asked
    ]
    choices = StructuredOutputsParams(choice=sorted({turn.answers[0] for _, turn in asked}))
    tiny, texts = served_tiny(Path(sys.argv[1]) / "tiny"), []
    with poisoned_pages(), engine(tiny, "duotone_4bit", **OPTIONS) as llm:
        counts = watched(llm)
        for guide in (None, choices):
            params = SamplingParams(max_tokens=32, temperature=0, structured_outputs=guide)
            found = llm.generate(prompts, params, use_tqdm=False)
            texts.append([x.outputs[0].text.strip() for x in found])
    wanted = [turn.answers for _, turn in asked]
    os.write(out, json.dumps({"texts": texts, "wanted": wanted, "counts": counts}).encode())


if __name__ == "__main__":
    main()
