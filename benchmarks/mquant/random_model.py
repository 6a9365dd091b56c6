"""Qwen2-VL of random weights, in 16 bit or by a recipe, made on the device part by part.

A quantized model is never there in 16 bit: its configuration's model is made without storage, and
linears are replaced by random codes of the recipe's kind. Norms, transforms and the split are those
of the recipe; channel 0 is split off wherever a transform is, which is the dearest case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from duotone.hf.model.cache_argument import CACHE
from duotone.hf.weights.checkpoint import empty_model, mark_quantized
from duotone.hf.weights.units import units_of
from duotone.hf.weights.weight_maps import weight_map
from duotone.weights.equivalences.hadamard import HadamardPlan, plan_hadamard
from duotone.weights.equivalences.module_map import WeightMap, at, put
from duotone.weights.equivalences.norms import RMSNorm, norm_parts
from duotone.weights.methods.recipe import Recipe, get_recipe
from duotone.weights.modules.modality import Modality
from duotone.weights.modules.packed_weight import PackedWeight, pack_int4
from duotone.weights.modules.quant_linear import QuantLinear

IMAGE, START, END = 151655, 151652, 151653
TINY_IMAGE, TINY_START, TINY_END = 290, 291, 292
# Of activations with unit variance; a model's text and pictures differ by more.
SCALES = (4.5 / 127, 5.5 / 127)


def config(tiny: bool, layers: int | None) -> Any:
    """Qwen2-VL-7B-Instruct's, or a tiny one; layers: of both stacks, None for all."""
    text = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": layers or 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    vision = {"depth": layers or 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16}
    text["rope_parameters"]["mrope_section"] = [16, 24, 24]
    if tiny:
        text |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers or 2}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
        text |= {"bos_token_id": None, "eos_token_id": None}
        text["rope_parameters"]["mrope_section"] = [2, 3, 3]
        vision = {"depth": layers or 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    ids = (TINY_IMAGE, TINY_START, TINY_END) if tiny else (IMAGE, START, END)
    return transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision | {"mlp_ratio": 4, "patch_size": 14},
        tie_word_embeddings=False,
        image_token_id=ids[0],
        vision_start_token_id=ids[1],
        vision_end_token_id=ids[2],
    )


@torch.no_grad()
def model(given: Any, recipe: str | None, device: torch.device) -> Any:
    """The model of a configuration, bf16; recipe: of `duotone.weights.RECIPES` or None."""
    made = empty_model(given, torch.bfloat16)
    modality = Modality()
    if recipe is not None:
        _quantize(made, get_recipe(recipe), modality, device)
    _fill(made, device)
    made = made.to(device).eval()
    if recipe is not None:
        mark_quantized(made, modality, {"recipe": get_recipe(recipe).to_dict()})
    return made


def nbytes(made: nn.Module) -> int:
    """Bytes of all weights."""
    return sum(t.numel() * t.element_size() for t in made.state_dict().values())


def _quantize(made: Any, recipe: Recipe, modality: Modality, device: torch.device) -> None:
    found = weight_map(made)
    turned = {"mlp_output"} if recipe.online != "none" else set()
    turned |= {"attention_output"} if recipe.online_attention else set()
    for unit in units_of(made, found, recipe.parts):
        for path, own in unit.recipes(made, recipe).items():
            whole, two = unit.whole(path), own.modality_scales and unit.part == "language"
            linear, is_turned = at(made, whole), unit.role(path) in turned
            plan = plan_hadamard(linear.in_features, pad=recipe.pad) if is_turned else None
            split = path in unit.split and own.split != "never"
            made_of = (linear, own, plan, two, split, modality, device)
            put(made, whole, _random_linear(*made_of))
    if recipe.rotation:
        _plain_norms(made, found)


def _random_linear(
    linear: nn.Linear,
    recipe: Recipe,
    plan: HadamardPlan | None,
    two: bool,
    split: bool,
    modality: Modality,
    device: torch.device,
) -> QuantLinear:
    columns = linear.in_features if plan is None else plan.padded
    w0 = None
    if split:
        w0 = torch.randn(linear.out_features, device=device, dtype=torch.bfloat16)
    static = recipe.activation == "static"
    bias = None
    if linear.bias is not None:
        bias = torch.zeros(linear.out_features, device=device, dtype=torch.bfloat16)
    return QuantLinear(
        random_weight(linear.out_features, columns, recipe.bits, w0, device),
        bias,
        in_features=linear.in_features,
        activation=recipe.activation,
        scales=torch.tensor(SCALES[: 2 if two else 1], device=device) if static else None,
        modality=modality,
        plan=plan,
    )


def random_weight(
    outs: int,
    ins: int,
    bits: int,
    w0: Tensor | None,
    device: torch.device,
    group: int | None = None,
) -> PackedWeight:
    """Gaussian codes as round-to-nearest makes them; products have about unit variance."""
    width, most = {8: (28.0, 127), 4: (2.5, 7)}[bits]
    drawn = torch.randn(outs, ins, device=device).mul_(width).round_().clamp_(-most, most)
    codes = drawn.to(torch.int8)
    if w0 is not None:
        codes[:, 0] = 0
    shape = (outs,) if group is None else (outs, ins // group)
    scale = torch.full(shape, ins**-0.5 / width, device=device)
    return PackedWeight(pack_int4(codes) if bits == 4 else codes, bits, scale, group, w0)


def _plain_norms(made: Any, found: WeightMap) -> None:
    """Put RMSNorms without weights in, as rotation leaves them."""
    for stream in found.streams:
        norms = [branch.norm for block in stream.blocks for branch in block.branches]
        for path in (*norms, *(reader.norm for reader in stream.readers)):
            put(made, path, RMSNorm(norm_parts(at(made, path)).eps))


def _fill(made: nn.Module, device: torch.device) -> None:
    """Parameters without storage become random ones: norms 1, biases 0."""
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            new = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if parameter.dim() == 1:
                new.fill_(float(name == "weight"))
            else:
                new.normal_(0, (new.numel() / len(new)) ** -0.5)
            module._parameters[name] = nn.Parameter(new, requires_grad=False)


def prompt(made: Any, tokens: int, text: int) -> dict[str, Tensor]:
    """One sequence of `tokens`: a square picture as large as leaves `text` tokens or more."""
    device, known, vision = made.device, made.config, made.config.vision_config
    merge = vision.spatial_merge_size
    side = int((tokens - text) ** 0.5)
    if side < 1:
        raise ValueError(f"a prompt needs more than {text} tokens of text, got {tokens}")
    ids = torch.randint(1, TINY_IMAGE, (1, tokens), device=device)
    ids[0, 0], ids[0, 1 + side**2] = known.vision_start_token_id, known.vision_end_token_id
    ids[0, 1 : 1 + side**2] = known.image_token_id
    patches = (side * merge) ** 2
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = [[1, side * merge, side * merge]]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == known.image_token_id).long(),
        "pixel_values": torch.randn(patches, values, device=device, dtype=made.dtype),
        "image_grid_thw": torch.tensor(grid, device=device),
    }


def decode_step(made: Any, context: int, steps: int, batch: int = 1) -> Callable[[], Tensor]:
    """A step of one token, `context` and what earlier steps added before it; at most `steps`.

    batch: sequences, which are alike. The mask is the same at every step, so that steps can be
    replayed: it shows the whole cache.
    """
    device, size = made.device, context + steps
    text = made.config.get_text_config(decoder=True)
    cache = transformers.StaticCache(config=text, max_cache_len=size)
    ids = torch.ones(batch, 1, dtype=torch.long, device=device)
    position = torch.full((3, batch, 1), context, device=device)
    shown = torch.ones(batch, 1, 1, size, dtype=torch.bool, device=device)
    mask = {"full_attention": shown}
    given = {"input_ids": ids, "position_ids": position, "attention_mask": mask}

    def step() -> Tensor:
        return made(**given, **{CACHE: cache}).logits

    step()
    for layer in cache.layers:
        layer.cumulative_length.fill_(context)
    return step
