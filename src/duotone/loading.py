"""Loader of a model with its processor: the embedded model, a local folder, or a hub name."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

EMBEDDED = "duotone-tiny"


@dataclass(frozen=True)
class Loaded:
    """A model ready to generate. `processor` is a tokenizer where the model takes text only."""

    name: str
    model: Any
    processor: Any

    @property
    def takes_images(self) -> bool:
        """True if pictures can be part of a prompt."""
        return image_token_ids(self.model.config) != ()

    @property
    def has_visual_tokens(self) -> bool:
        """True if pictures are among the tokens of a prompt."""
        return has_visual_tokens(self.model.config)


def image_token_ids(config: Any) -> tuple[int, ...]:
    """Ids of the placeholders of visual tokens in the prompt; () for a text-only model."""
    from duotone.hf.model.facts import visual_token_ids

    return visual_token_ids(config)


def has_visual_tokens(config: Any) -> bool:
    """True if pictures are among a model's tokens; layers of some attend to them otherwise."""
    from duotone.hf.model.support import attends_across

    return image_token_ids(config) != () and not attends_across(config)


def visual_mask(config: Any, ids: torch.Tensor) -> torch.Tensor:
    """Bool, of the shape of `ids`: True at visual tokens."""
    known = torch.tensor(image_token_ids(config), device=ids.device, dtype=ids.dtype)
    return torch.isin(ids, known)


def default_device() -> str:
    """'cuda' if available, else 'cpu'."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(name: str) -> torch.device:
    """The device of a name. Errors: ValueError where torch cannot hold numbers on it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError) as error:  # builds without CUDA assert
        raise ValueError(
            f"the device must be one that this torch can use, e.g. cpu, cuda or cuda:1; got "
            f"{name!r}: {_one_line(error)}. Use {default_device()!r}"
        ) from error
    return device


def _resolve(name: str | None) -> str:
    if name in (None, EMBEDDED):
        from duotone.models import duotone_tiny_path

        return str(duotone_tiny_path())
    local = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or os.sep != "/"
    if local.exists() or looks_local:
        if not (local / "config.json").is_file():
            raise ValueError(
                f"a local model must be a folder with a config.json, got {name!r}; "
                f"check the path, or leave the model out for the embedded {EMBEDDED}"
            )
        return str(local)
    _check_hub(name)
    return name


def _check_hub(name: str) -> None:
    """Ask the hub once for a name that is no folder; transformers would retry for a minute.

    Errors: ValueError where the hub has no such model, or does not answer.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except RepositoryNotFoundError as error:
        if not isinstance(error, GatedRepoError):
            raise _not_found(name, "the hub has no such model that you may read") from error
    except (HfHubHTTPError, OfflineModeIsEnabled):
        return  # transformers says at once what is missing
    except Exception as error:  # of the client's own HTTP package, which changes with its version
        raise _not_found(name, f"the hub does not answer: {_one_line(error)}") from error


def _not_found(name: str, why: str) -> ValueError:
    return ValueError(
        f"a model must be a folder or hub name; there is no folder {name!r} here, and {why}. "
        f"Check the name, or leave the model out for the embedded {EMBEDDED}"
    )


def _from_pretrained(path: str, dtype: Any, with_processor: bool) -> tuple[Any, Any]:
    import transformers

    from duotone.hf.weights import checkpoint as quantized

    if quantized.is_quantized_folder(path):
        # It looks whether its files are whole, the configuration among them, before it reads them.
        model = quantized.load(path, dtype)
        of_model = quantized.model_class(model.config)
    else:
        of_model = quantized.model_class(transformers.AutoConfig.from_pretrained(path))
        model = of_model.from_pretrained(path, dtype=dtype or torch.bfloat16)
    of_images = of_model is transformers.AutoModelForImageTextToText
    takes_images = of_images or image_token_ids(model.config) != ()
    of_processor = transformers.AutoProcessor if takes_images else transformers.AutoTokenizer
    return model, of_processor.from_pretrained(path) if with_processor else None


def _unreadable() -> tuple[type[Exception], ...]:
    """Errors that transformers raises for a damaged folder; it has its own check of field types."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    from duotone.tools.tensor_file import FOREIGN

    return (*FOREIGN, StrictDataclassError, SafetensorError)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def load_config(name: str | None = None) -> Any:
    """The configuration of `name` alone: a folder, a config.json or a hub name."""
    if name is not None and Path(name).name == "config.json":
        name = str(Path(name).parent)
    path = _resolve(name)
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(path)
    except _unreadable() as error:
        raise ValueError(
            f"a model must be a folder or hub name with a config, got {name!r}: {_one_line(error)}"
        ) from error


def load(
    name: str | None = None,
    device: str | None = None,
    dtype: Any = None,
    *,
    with_processor: bool = True,
) -> Loaded:
    """Load `name` (None: the embedded model) onto `device`, in evaluation mode.

    A folder that `duotone quantize` wrote loads the same way.
    dtype: None is bfloat16, so that the cache of the unquantized model really has 16 bits; a
        quantized model keeps the dtype of its quantization.
    with_processor: False where the data are token ids; then a folder needs no tokenizer.
    """
    path = _resolve(name)
    on = usable_device(device or default_device())
    try:
        model, processor = _from_pretrained(path, dtype, with_processor)
    except _unreadable() as error:
        raise ValueError(
            f"a model must be a folder or hub name that transformers can load, got {name!r}: "
            f"{_one_line(error)}"
        ) from error
    return Loaded(name or EMBEDDED, model.to(on).eval(), processor)
