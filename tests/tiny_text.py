"""A random Llama over 32 letters and a tokenizer for it, built without files."""

import torch
import transformers

LETTERS = "abcdefghijklmnopqrstuvwxyz .?!Q:"


class LetterTokenizer:
    """The part of a tokenizer that duotone uses; other characters become letters too."""

    pad_token_id = None

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def apply_chat_template(self, chats, *, add_generation_prompt, tokenize):
        return [f"{chat[0]['role'][0]}{chat[0]['content']}" for chat in chats]

    def __call__(self, texts, **kwargs):
        if isinstance(texts, str):
            return {"input_ids": [ord(letter) % len(LETTERS) for letter in texts]}
        return {"input_ids": [self(text)["input_ids"] for text in texts]}

    def batch_decode(self, rows, **kwargs):
        return ["".join(LETTERS[token] for token in row) for row in rows]


def text_model(seed: int = 0, **changes):
    """Two layers, weights with a large spread, so that answers depend on the cache."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.4}
    texts = {"vocab_size": len(LETTERS), "max_position_embeddings": 4096}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.LlamaConfig(**sizes | heads | texts | ids | changes)
    return transformers.LlamaForCausalLM(config).eval()


def text_batch(lengths, seed=0):
    """Left-padded random letters."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    rows = [torch.randint(0, 32, (n,), generator=generator) for n in lengths]
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in lengths])
    return {"input_ids": ids, "attention_mask": mask}
