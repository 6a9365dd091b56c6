"""Models and prompts that `duotone bench generate` measures, by the name of a model."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .common import load_model, say


@contextmanager
def subject(name: str, device: Any, load: Any) -> Iterator[Any]:
    """The model of a name, and its prompt; inside, files of random bases are kept for it.

    Errors: ValueError for a load with pictures of a length that others than a config.json have.
    """
    import torch

    from duotone.bench.generate import Subject
    from duotone.inference import random_models as made
    from duotone.loading import load_config

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mask = None
    if load.picture_tokens is not None and not name.endswith(".json"):
        raise ValueError(
            f"--picture-tokens goes with a config.json, of which words alone are read; got --model "
            f"{name!r}, whose pictures have their own size"
        )
    if name in made.SHAPES:
        model = made.random_model(name, device, dtype)
        given = made.random_prompt(name, model, load.batch, load.tokens)

        def few() -> dict[str, Any]:
            return made.short_prompt(name, model)

    elif name.endswith(".json"):
        if Path(name).name != "config.json":
            raise ValueError(f"a configuration is a config.json; got --model {name!r}")
        model = made.random_model_of(load_config(name), device, dtype)
        given, mask = made.marked_prompt(
            model, load.batch, load.tokens, picture=load.picture_tokens
        )
        if mask is None and load.picture_tokens is not None:
            raise ValueError(
                f"--picture-tokens goes with a model that takes pictures; got {name!r}"
            )

        def few() -> dict[str, Any]:
            return made.marked_prompt(model, 1, 4 * made.TEXT)[0]

    else:
        loaded = load_model(name, str(device))
        model = loaded.model
        given = made.prompt_of_noise(loaded, load.batch, load.tokens)

        def few() -> dict[str, Any]:
            return made.prompt_of_noise(loaded, 1, 1)

    if load.padded:
        given = made.left_padded(given)
        mask = None if mask is None else mask & (given["attention_mask"] == 1)
    with tempfile.TemporaryDirectory() as folder:
        is_random = name in made.SHAPES or name.endswith(".json")
        yield Subject(
            name,
            model,
            given,
            mask,
            quantize=lambda recipe: _quantize(model, few(), recipe),
            calibrated=_calibrated(model, Path(folder)) if is_random else None,
        )


def prompts(name: str, model: Any, visual: int) -> Callable[[int, int], tuple[Any, Any]]:
    """A function of (visual tokens, text) that makes one sequence's prompt, and its visual mask.

    Errors: ValueError for a model that is no shape or config.json, and for visual tokens that are
    no whole tiles of a shape.
    """
    from duotone.inference import random_models as made

    if name in made.SHAPES:
        of_tile = made.tile_tokens(name)
        if visual % of_tile or not visual:
            raise ValueError(
                f"--tokens with --budget are visual tokens, whole tiles of {of_tile}; got {visual}"
            )
        return lambda n, text: (made.tiled_prompt(name, model, 1, n // of_tile, text), None)
    if not name.endswith(".json"):
        raise ValueError(
            f"--budget measures prompts of given lengths: give a shape or a config.json; got "
            f"--model {name!r}"
        )
    return lambda n, text: made.marked_prompt(model, 1, n + text, text)


def _calibrated(model: Any, folder: Path) -> Callable[[str], Any]:
    """A maker of calibrated specs for the model as it is, with random bases, by a row's base.

    They are drawn once for each fingerprint, which bases carry and quantized weights change.
    """
    from duotone.bench.generate_rows import CALIBRATED_TEXT
    from duotone.calibrate.random_bases import random_bases, random_bases_with_text
    from duotone.hf.model.fingerprint import fingerprint

    @cache
    def spec_of(name: str, base: str) -> Any:
        if base == CALIBRATED_TEXT:
            (folder / name).mkdir()
            return random_bases_with_text(model, folder / name)
        return random_bases(model, folder / f"{name}.safetensors")

    return lambda base: spec_of(fingerprint(model), base)


def _quantize(model: Any, few: dict[str, Any], recipe: str) -> None:
    """Quantize the weights in place; static ranges are those of a short prompt."""
    from duotone.quantize import quantize_model
    from duotone.quantize.calibration import CalibrationSet
    from duotone.weights import get_recipe

    say(f"quantizing the weights by {recipe}")
    quantize_model(model, get_recipe(recipe), CalibrationSet([few], {}, []))
