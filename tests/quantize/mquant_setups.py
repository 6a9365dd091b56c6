"""A tiny random InternVL, its task, and a recipe's model made of them."""

from duotone.loading import Loaded
from duotone.quantize import CalibrationSet, calibration_set, quantize_model
from duotone.weights.methods.recipe import Recipe, get_recipe
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model


class WordProcessor(TinyProcessor):
    """With the tokenizer's call that answers are encoded by."""

    def __call__(self, texts, *, add_special_tokens):
        assert not add_special_tokens
        from tiny_vlm import WORDS

        return {"input_ids": [[WORDS.index(word) for word in text.split()] for text in texts]}

    def save_pretrained(self, folder):
        """Nothing to save."""


def tiny_loaded() -> Loaded:
    return Loaded("tiny", tiny_model(), WordProcessor())


def tiny_data(loaded: Loaded, samples: int = 4) -> CalibrationSet:
    return calibration_set(loaded, [TINY_TASK], samples, batch_size=2)


def quantized(name: str = "mquant-w4a8", **changes) -> tuple[Loaded, dict]:
    """(model quantized by a recipe, its report)."""
    loaded = tiny_loaded()
    recipe: Recipe = get_recipe(name).replace(**changes)
    return loaded, quantize_model(loaded.model, recipe, tiny_data(loaded), name="tiny")
