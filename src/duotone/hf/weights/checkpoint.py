"""Quantized models as checkpoints: configuration, records of replaced modules, tensors.

A folder holds what transformers writes (config, generation config, processor) and two files of
ours: `duotone_weights.json` says what was replaced and by which recipe, `quantized.safetensors`
has all tensors. transformers alone finds no weights there, which is better than wrong ones.

The tensors' file repeats the header, which has digests of the configurations beside it, under a
checksum: what does not belong together is not loaded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from duotone.hf.weights.fusion import fuse
from duotone.hf.weights.modality import VisualRows
from duotone.hf.weights.reorder import reorder_always
from duotone.tools import tensor_file
from duotone.weights.equivalences.module_map import put
from duotone.weights.modules.checkpoint_records import changes, made_of
from duotone.weights.modules.modality import Modality
from duotone.weights.modules.quant_linear import QuantLinear

# 2: a checksum.
FORMAT = 2
HEADER, TENSORS = "duotone_weights.json", "quantized.safetensors"
# What else `load` reads.
CONFIGS = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class Quantization:
    """Facts of a quantized model in addition to its modules.

    header: recipe, base model, calibration data, memory; JSON-safe.
    """

    modality: Modality
    header: Mapping[str, Any]


def quantization_of(model: nn.Module) -> Quantization | None:
    """Facts of a quantized model; None for any other."""
    return getattr(model, "duotone_quantization", None)


def mark_quantized(model: PreTrainedModel, modality: Modality, header: Mapping[str, Any]) -> None:
    """From now on `model` tells its linears which rows are visual, and knows what it is.

    Its modules hand codes on where they can (`duotone.hf.weights.fusion`); by a recipe with
    `visual_first` it runs reordered, too.
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
    """True if a folder has a checkpoint of ours."""
    return (Path(folder) / HEADER).is_file()


def model_class(config: Any) -> type:
    """The auto class of a configuration: multimodal, or text only."""
    auto, names = (
        transformers.AutoModelForImageTextToText,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    if name := names.get(config.model_type):
        # transformers 5.23 looks for Evolla under a wrong name, and finds no model.
        if type(config) not in auto._model_mapping:
            auto.register(type(config), getattr(transformers, name), exist_ok=True)
        return auto
    return transformers.AutoModelForCausalLM


def save(model: PreTrainedModel, folder: str | Path, processor: Any = None) -> Path:
    """Write a quantized model into a new or empty folder.

    Errors: ValueError for a model that is not quantized, or a folder with something in it.
    """
    known = quantization_of(model)
    if known is None:
        raise ValueError("only a quantized model is saved here; call quantize_model first")
    folder = Path(folder)
    check_new_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plain = empty_model(model.config, model.dtype)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    header = {
        **known.header,
        "format": FORMAT,
        "dtype": str(model.dtype).removeprefix("torch."),
        "modules": changes(model, plain),
        "configs": _config_digests(folder),
    }
    tensor_file.write(folder / TENSORS, _tensors(model), header, "duotone")
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


def _config_digests(folder: Path) -> dict[str, str]:
    """{file: digest of its bytes} of the configurations that are there."""
    present = [name for name in CONFIGS if (folder / name).is_file()]
    return {n: blake2b((folder / n).read_bytes(), digest_size=16).hexdigest() for n in present}


def read_header(folder: str | Path, waive: Collection[str] = ()) -> dict[str, Any]:
    """The JSON of a checkpoint. Errors: ValueError for another format, or what cannot be read."""
    path = Path(folder) / HEADER
    with tensor_file.damage_named(f"{path} cannot be read, the checkpoint is damaged"):
        header = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(header, dict):
            raise ValueError("it is no JSON object")
    if header.get("format") != FORMAT and "checksum" not in waive:
        raise ValueError(
            f"checkpoints of format {FORMAT} are read, got format {header.get('format')!r} in "
            f"{str(folder)!r}; quantize again with this version of duotone. One of format 1 has no "
            "checksum: duotone.hf.weights.checkpoint.load(folder, waive=('checksum',)) reads it"
        )
    return header


def load(
    folder: str | Path, dtype: torch.dtype | None = None, waive: Collection[str] = ()
) -> PreTrainedModel:
    """The model of a checkpoint, on the CPU.

    dtype: must be the one it was quantized in. waive: ("checksum",) reads files that do not belong
    together, or are of before there were checksums, as far as they fit. Errors: ValueError naming
    the folder for another dtype or format, and for a checkpoint that is damaged.
    """
    if set(waive) - {"checksum"}:
        raise ValueError(f"waive must be () or ('checksum',), got {waive!r}")
    folder, header = Path(folder), read_header(folder, waive)
    subject = f"the checkpoint in {str(folder)!r} cannot be loaded"
    with tensor_file.damage_named(subject, StrictDataclassError):
        tensors = _checked_tensors(folder, header, waive)
        own = getattr(torch, header["dtype"])
        if dtype not in (None, own):
            raise ValueError(f"it was quantized in {own}, got dtype={dtype}; leave it out")
        model, modality = _made(folder, header, own)
        _fill(model, tensors)
        if (folder / CONFIGS[1]).is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        mark_quantized(model, modality, header)
    return model.eval()


def load_empty(folder: str | Path) -> PreTrainedModel:
    """The model of a checkpoint without its tensors, for their shapes; errors as of `load`."""
    folder, header = Path(folder), read_header(folder)
    subject = f"the checkpoint in {str(folder)!r} cannot be read"
    with tensor_file.damage_named(subject, StrictDataclassError):
        return _made(folder, header, getattr(torch, header["dtype"]))[0]


def _checked_tensors(
    folder: Path, header: Mapping[str, Any], waive: Collection[str]
) -> dict[str, Tensor]:
    """All tensors. Errors: ValueError where files do not belong together."""
    strict, what = "checksum" not in waive, "the tensors of a checkpoint"
    if not (folder / TENSORS).is_file():
        raise ValueError(f"it has no {TENSORS}")
    known, tensors = tensor_file.read(folder / TENSORS, "duotone", what, strict)
    if strict and known != header:
        raise ValueError(f"{HEADER} is not what belongs to {TENSORS}: one of them was changed")
    if strict and header["configs"] != _config_digests(folder):
        raise ValueError(
            f"{' or '.join(CONFIGS)} is not what was saved. Restore it; load(folder, "
            "waive=('checksum',)) takes it as it is"
        )
    odd = [] if strict else [name for name, t in tensors.items() if not torch.isfinite(t).all()]
    if odd:
        raise ValueError(f"its numbers must be finite, got inf or NaN in {odd[0]}")
    return tensors


def _made(
    folder: Path, header: Mapping[str, Any], dtype: torch.dtype
) -> tuple[PreTrainedModel, Modality]:
    """The model without its tensors."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model, modality = empty_model(config, dtype), Modality()
    for path, record in header["modules"].items():
        put(model, path, made_of(record, dtype, modality, model.get_submodule(path)))
    return model, modality


def _fill(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    # What is mapped from a file may lie anywhere; kernels want rows at multiples of 16 bytes.
    aligned = {n: t if t.data_ptr() % 16 == 0 else t.clone() for n, t in tensors.items()}
    wanted = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    wrong = [name for name, t in aligned.items() if t.dtype != wanted.get(name, t.dtype)]
    if wrong:
        raise ValueError(f"{wrong[0]} must be {wanted[wrong[0]]}, got {aligned[wrong[0]].dtype}")
    result = model.load_state_dict(aligned, strict=False, assign=True)
    model.tie_weights()
    left = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    left += [name for name, tensor in model.named_buffers() if tensor.is_meta]
    if left or result.unexpected_keys:
        raise ValueError(
            f"its tensors must be those of its records; missing {left[:3]}, left over "
            f"{result.unexpected_keys[:3]}; the checkpoint is damaged, quantize again"
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
