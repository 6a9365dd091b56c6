"""Export to the compressed-tensors format, which vLLM and transformers read.

That format can say: W8A8 with a static or dynamic scale (int-quantized), W4A16 and W4A8 with a
scale per token (pack-quantized). It cannot say two scales per modality, a split channel or an
online Hadamard of any size; what it lacks stands beside it in `duotone_export.json`, or is refused.

Weights come back bit for bit, and static int8 codes too, but for the lowest: ours end at -127, the
format's at -128. A scale per token is max|x| / 127 here and in vLLM; the compressed-tensors library
divides by 127.5. Scales are written in float32; loaders may round them to the model's type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duotone.hf.weights.checkpoint import check_new_folder, empty_model, quantization_of
from duotone.weights.methods.recipe import Recipe
from duotone.weights.methods.rule import HEAD
from duotone.weights.modules.checkpoint_records import changes
from duotone.weights.modules.int32_packing import pack_int32
from duotone.weights.modules.quant_linear import QuantLinear

EXPRESSIBLE = (
    "compressed-tensors expresses W8A8, W4A16 and dynamic W4A8 of an unrotated model whose linears "
    "are alike and whose head is not quantized"
)
REMEDY = (
    "Quantize with rtn-w8a8, smoothquant-w8a8, static-msq-w8a8, dynamic-w4a8, w4a16-g128 or "
    "awq-w4a16-g128, or keep our own format"
)
SIDECAR = "duotone_export.json"


def export(model: PreTrainedModel, folder: str | Path, processor: Any = None) -> Path:
    """Write a quantized model in the compressed-tensors format.

    Of two static scales the larger one is written, which clips neither modality; both stand in the
    sidecar. Errors: ValueError for a model that the format cannot express, or a used folder.
    """
    from safetensors.torch import save_file

    known = quantization_of(model)
    if known is None:
        raise ValueError("only a quantized model is exported; call quantize_model first")
    folder = Path(folder)
    check_new_folder(folder)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    _check(model, linears)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(model, linears), folder / "model.safetensors", metadata={"format": "pt"})
    model.generation_config.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    config = json.dumps(_config(model, linears), indent=1) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    sidecar = known.header | {"modality_scales": _modality_scales(linears)}
    (folder / SIDECAR).write_text(json.dumps(sidecar, indent=1) + "\n", encoding="utf-8")
    return folder


def check_expressible(recipe: Recipe, channels: Iterable[int] = ()) -> None:
    """Raise ValueError, before any work, for a recipe whose models `export` would refuse.

    channels: numbers of inputs of the linears that shall be quantized; ours are padded where need
    be, the format's are not.
    """
    static4 = (recipe.bits, recipe.activation) == (4, "static")
    mixed = bool(recipe.rules) or HEAD in recipe.parts
    if recipe.rotation or recipe.has_online or static4 or recipe.visual_first or mixed:
        raise ValueError(f"{EXPRESSIBLE}, got {recipe}. {REMEDY}")
    multiple = recipe.group or 2
    odd = sorted({count for count in channels if count % multiple})
    if odd:
        raise ValueError(
            "compressed-tensors has no padding: inputs of linears must be multiples of "
            f"{multiple}, got {odd[0]}. Choose a recipe without groups, or keep our own format"
        )


def _check(model: PreTrainedModel, linears: dict[str, QuantLinear]) -> None:
    """Raise ValueError naming the first thing that the format has no word for."""
    records = changes(model, empty_model(model.config, model.dtype))
    wrong = [path for path, record in records.items() if record["kind"] != "quantized"]
    wrong += [n for n, m in linears.items() if m.plan is not None or m.weight_w0 is not None]
    wrong += [n for n, m in linears.items() if m.columns != m.in_features]
    wrong += [n for n, m in linears.items() if (m.bits, m.activation) == (4, "static")]
    kinds = {n: (m.bits, m.activation, m.group_size) for n, m in linears.items()}
    wrong += [n for n, kind in kinds.items() if kind != next(iter(kinds.values()))]
    if wrong:
        raise ValueError(
            f"{EXPRESSIBLE}, got {wrong[0]!r} and {len(wrong) - 1} more with other modules, "
            f"transforms, padding, static W4A8 or bits of their own. {REMEDY}"
        )


def _config(model: PreTrainedModel, linears: dict[str, QuantLinear]) -> dict[str, Any]:
    """config.json. A model that was not loaded from a folder has no architecture in its own."""
    return json.loads(model.config.to_json_string()) | {
        "architectures": [type(model).__name__],
        "quantization_config": quantization_config(model, linears),
    }


def quantization_config(model: nn.Module, linears: dict[str, QuantLinear]) -> dict[str, Any]:
    """The `quantization_config` of config.json: one group of linears, the others ignored."""
    first = next(iter(linears.values()))
    kind = "int-quantized" if first.bits == 8 else "pack-quantized"
    group = {
        "targets": ["Linear"],
        "weights": _weight_arguments(first),
        "input_activations": _activation_arguments(first),
        "output_activations": None,
        "format": kind,
    }
    plain = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weight_arguments(linear: QuantLinear) -> dict[str, Any]:
    grouped = linear.group_size is not None
    return {
        "num_bits": linear.bits,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group" if grouped else "channel",
        "group_size": linear.group_size,
    }


def _activation_arguments(linear: QuantLinear) -> dict[str, Any] | None:
    if linear.activation == "none":
        return None
    dynamic = linear.activation == "dynamic"
    return {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "dynamic": dynamic,
        "strategy": "token" if dynamic else "tensor",
    }


def _tensors(model: PreTrainedModel, linears: dict[str, QuantLinear]) -> dict[str, Tensor]:
    """The model's tensors, those of quantized linears by the format's names."""
    found = {
        f"{path}.{name}": tensor.cpu().contiguous()
        for path, linear in linears.items()
        for name, tensor in _linear_tensors(linear).items()
    }
    tied = set() if not model.config.tie_word_embeddings else {"lm_head.weight"}
    for name, tensor in model.state_dict().items():
        if name.rsplit(".", 1)[0] not in linears and name not in tied:
            found[name] = tensor.detach().cpu().clone().contiguous()
    return found


def _linear_tensors(linear: QuantLinear) -> dict[str, Tensor]:
    weight = linear.packed
    scale = weight.scale if weight.scale.dim() == 2 else weight.scale[:, None]
    found = {"weight_scale": scale}
    if linear.bits == 8:
        found["weight"] = weight.codes
    else:
        found["weight_packed"] = pack_int32(weight.unpacked())
        found["weight_shape"] = torch.tensor(weight.shape)
    if linear.scales is not None:
        found["input_scale"] = linear.scales.max()[None]
    if linear.bias is not None:
        found["bias"] = linear.bias
    return found


def _modality_scales(linears: dict[str, QuantLinear]) -> dict[str, list[float]]:
    """{path: [text, visual]} of the linears that have both."""
    both = {n: m.scales for n, m in linears.items() if m.scales is not None and len(m.scales) == 2}
    return {name: scales.tolist() for name, scales in both.items()}
