"""A folder that `vllm serve --load-format dummy` serves: a known shape, and a word for every id.

    PYTHONPATH=src:. python -m benchmarks.serve.model llama-8b FOLDER
    duotone bench serve FOLDER --cache 30GB --server-options "--load-format dummy"

Each word is one token, so that prompts have the lengths that the client asks for.
"""

import argparse
from pathlib import Path

from benchmarks.serve.steps import SHAPES, save_config

LONGEST = 131072
# vLLM bounds a prompt's characters by its tokens times the longest word, and spaces count as well.
UNKNOWN = "<unknown word>"


def save_words(count: int, folder: Path) -> None:
    """A tokenizer of `count` words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = (UNKNOWN, "<s>", "</s>")
    words = [*special, *(f"w{number}" for number in range(len(special), count))]
    ids = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(ids, unk_token=special[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=special[0], bos_token=special[1], eos_token=special[2]
    ).save_pretrained(folder)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    save_config(args.shape, args.folder, LONGEST)
    save_words(SHAPES[args.shape][-1], args.folder)


if __name__ == "__main__":
    main()
