"""Quantized models as checkpoints: configuration, records of replaced modules, tensors.

A folder holds what transformers writes (config, generation config, processor) and two files of
ours: `duotone_weights.json` says what was replaced and by which recipe, `quantized.safetensors`
has all tensors. transformers alone finds no weights there, which is better than wrong ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from duotone.hf.fusion import fuse
from duotone.hf.modality import VisualRows
from duotone.hf.reorder import reorder_always
from duotone.weights.modality import Modality
from duotone.weights.quant_linear import QuantLinear
from duotone.weights.records import changes, made_of
from duotone.weights.structure import put

FORMAT = 1
HEADER, TENSORS = "duotone_weights.json", "quantized.safetensors"


@dataclass(frozen=True)
class Quantization:
    """What belongs to a quantized model beside its modules.

    header: recipe, base model, calibration data, memory; JSON-safe.
    """

    modality: Modality
    header: Mapping[str, Any]


def quantization_of(model: nn.Module) -> Quantization | None:
    """Of a quantized model, None of any other."""
    return getattr(model, "duotone_quantization", None)


def mark_quantized(model: PreTrainedModel, modality: Modality, header: Mapping[str, Any]) -> None:
    """From now on `model` tells its linears which rows are visual, and knows what it is.

    Its modules hand codes on where they can (`duotone.hf.fusion`); by a recipe with `visual_first`
    it runs reordered, too.
    """
    model.duotone_quantization = Quantization(modality, header)
    VisualRows.attach(model, modality)
    fuse(model)
    # Checkpoints from before there was such a field have none.
    if header["recipe"].get("visual_first", False):
        reorder_always(model)


def check_not_quantized(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that is quantized, by us or by another library."""
    foreign = getattr(model.config, "quantization_config", None) is not None
    packed = [name for name, p in model.named_parameters() if not p.is_floating_point()]
    if foreign or packed or any(isinstance(m, QuantLinear) for m in model.modules()):
        where = f" ({packed[0]} is packed)" if packed else ""
        raise ValueError(
            f"this {model.config.model_type!r} model is quantized already{where}, which cannot be "
            "undone; start from its 16- to 64-bit weights"
        )


def is_quantized_folder(folder: str | Path) -> bool:
    """Whether a folder has a checkpoint of ours."""
    return (Path(folder) / HEADER).is_file()


def model_class(config: Any) -> type:
    """The auto class of a configuration: multimodal, or text only."""
    if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def save(model: PreTrainedModel, folder: str | Path, processor: Any = None) -> Path:
    """Write a quantized model into a new or empty folder.

    Errors: ValueError for a model that is not quantized, or a folder with something in it.
    """
    from safetensors.torch import save_file

    known = quantization_of(model)
    if known is None:
        raise ValueError("only a quantized model is saved here; call quantize_model first")
    folder = Path(folder)
    check_new_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plain = empty_model(model.config, model.dtype)
    header = {
        "format": FORMAT,
        **known.header,
        "dtype": str(model.dtype).removeprefix("torch."),
        "modules": changes(model, plain),
    }
    save_file(_tensors(model), folder / TENSORS)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    # Last: a folder without it is no checkpoint.
    (folder / HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
    return folder


def check_new_folder(folder: Path) -> None:
    """Raise ValueError unless `folder` is absent or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"a checkpoint needs a new or empty folder, got the existing {str(folder)!r}; "
            "move it away or give another --out"
        )


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """All tensors once: a tied head is made anew by its configuration."""
    seen: dict[tuple, str] = {}
    found = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if tensor.numel() and seen.setdefault(place, name) != name:
            continue
        found[name] = tensor.detach().cpu().contiguous()
    return found


def read_header(folder: str | Path) -> dict[str, Any]:
    """The JSON of a checkpoint. Errors: ValueError for another format."""
    header = json.loads((Path(folder) / HEADER).read_text(encoding="utf-8"))
    if header.get("format") != FORMAT:
        raise ValueError(
            f"checkpoints of format {FORMAT} are read, got format {header.get('format')!r} in "
            f"{str(folder)!r}; quantize again with this version of duotone"
        )
    return header


def load(folder: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of a checkpoint, on the CPU.

    dtype: must be the one it was quantized in. Errors: ValueError for that, for another format, and
    for tensors that do not fit the records.
    """
    from safetensors.torch import load_file

    folder, header = Path(folder), read_header(folder)
    own = getattr(torch, header["dtype"])
    if dtype not in (None, own):
        raise ValueError(
            f"the model in {str(folder)!r} was quantized in {own}, got dtype={dtype}; leave it out"
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    model, modality = empty_model(config, own), Modality()
    for path, record in header["modules"].items():
        put(model, path, made_of(record, own, modality, model.get_submodule(path)))
    _fill(model, load_file(folder / TENSORS), folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    mark_quantized(model, modality, header)
    return model.eval()


def _fill(model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> None:
    # What is mapped from a file may lie anywhere; kernels want rows at multiples of 16 bytes.
    aligned = {n: t if t.data_ptr() % 16 == 0 else t.clone() for n, t in tensors.items()}
    result = model.load_state_dict(aligned, strict=False, assign=True)
    model.tie_weights()
    left = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    left += [name for name, tensor in model.named_buffers() if tensor.is_meta]
    if left or result.unexpected_keys:
        raise ValueError(
            f"the tensors in {str(folder)!r} must be those of its records; missing {left[:3]}, "
            f"left over {result.unexpected_keys[:3]}; the checkpoint is damaged, quantize again"
        )


def empty_model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model of parameters without storage; its buffers, which configurations fill, are real."""
    with _meta_parameters():
        return model_class(config).from_config(config, dtype=dtype)


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Inside, every new parameter goes to the meta device at once."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]
