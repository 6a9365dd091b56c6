import pytest
import torch

from duotone.inference.prompts import (
    encode_text,
    encoder_of,
    left_padded,
    right_padded,
    tokenizer_of,
)


class Tokenizer:
    """A letter is a token; remembers what it was asked."""

    pad_token_id = None

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def apply_chat_template(self, chats, *, add_generation_prompt, tokenize):
        return [f"<{chat[0]['role']}>{chat[0]['content']}" for chat in chats]

    def __call__(self, texts, *, add_special_tokens=True, verbose=True):
        self.asked = (texts, add_special_tokens)
        if isinstance(texts, str):
            return {"input_ids": [ord(letter) for letter in texts]}
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


@pytest.mark.parametrize(
    ("template", "asked"),
    [(None, (["hello"], True)), ("{}", (["<user>hello"], False))],
    ids=["no template", "chat"],
)
def test_text_prompts_use_the_chat_template_where_there_is_one(template, asked):
    tokenizer = Tokenizer(template)
    encoded = encode_text(tokenizer, ["hello"])
    assert encoded["input_ids"].shape == encoded["attention_mask"].shape
    assert tokenizer.asked == asked


def test_prompts_are_padded_on_the_left():
    encoded = left_padded([[5], [6, 7, 8]], pad=9)
    assert encoded["input_ids"].tolist() == [[9, 9, 5], [6, 7, 8]]
    assert encoded["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]


def test_answers_are_padded_on_the_right():
    ids, real = right_padded([[5], [], [6, 7]], torch.device("cpu"))
    assert ids.tolist() == [[5, 0], [0, 0], [6, 7]]
    assert real.tolist() == [[True, False], [False, False], [True, True]]


def test_the_tokenizer_is_found_inside_a_processor():
    class Processor:
        tokenizer = Tokenizer()

    assert tokenizer_of(Processor()) is Processor.tokenizer
    assert tokenizer_of(Processor.tokenizer) is Processor.tokenizer
    assert encoder_of(Processor())("ab") == [97, 98]
