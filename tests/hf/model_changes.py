"""Changes that people make to a model between two calls, and its answers before and after."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from adapted import adapted_layers
from small_specs import STREAM
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured, remove
from transformers import PreTrainedModel

import duotone

from families import inputs, new_model

Change = Callable[[PreTrainedModel], None]
# Enough for a capture of a step and one of a flush.
NEW, PROMPT = 10, [[9], [5]]


def answer(model: PreTrainedModel, device: str | None = None, **more: Any) -> Any:
    """device: of the prompt, where it is not the weights'."""
    given = {n: x.to(device or model.device) for n, x in inputs("llama", PROMPT).items()}
    call = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, **more}
    return model.generate(**given, **call, return_dict_in_generate=True)


def logits(model: PreTrainedModel, device: str | None = None) -> Tensor:
    return torch.stack(answer(model, device).logits)


def other(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(x) * 0.2


class Steered(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.vector = inner, None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return out if self.vector is None else out + self.vector


def new_parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(other(model.lm_head.weight))


def swap_data(model: PreTrainedModel) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.weight.data = other(linear.weight)


def assign_state(model: PreTrainedModel) -> None:
    state = {name: x + 0.1 * other(x) for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def exchange_module(model: PreTrainedModel) -> None:
    model.model.norm = nn.Identity()


def scale_attention(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.scaling *= 3


def rescale_positions(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 4


def patch_forward(model: PreTrainedModel) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), mlp)


def resize_embeddings(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 16)


def round_trip(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def set_vector(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.vector = other(model.model.norm.weight) * 5


def quantize(model: PreTrainedModel) -> None:
    from duotone.quantize import quantize_model
    from duotone.quantize.calibration import CalibrationSet
    from duotone.weights import get_recipe

    given = {n: x.to(model.device) for n, x in inputs("llama", PROMPT).items()}
    quantize_model(model, get_recipe("rtn-w4a8"), CalibrationSet([given], {}, []))


def tie(model: PreTrainedModel) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def exchange_embeddings(model: PreTrainedModel) -> None:
    shape = model.get_input_embeddings().weight.shape
    embeddings = nn.Embedding(*shape, device=model.device)
    embeddings.weight.data = other(embeddings.weight)
    model.set_input_embeddings(embeddings)


def parametrize(model: PreTrainedModel) -> None:
    up = weight_norm(model.model.layers[0].mlp.up_proj)
    up.parametrizations.weight.original0.data *= 2


def prune(model: PreTrainedModel) -> None:
    up = model.model.layers[0].mlp.up_proj
    remove(l1_unstructured(up, "weight", 0.5), "weight")


CHANGES = [
    new_parameter, swap_data, assign_state, exchange_module, scale_attention, rescale_positions,
    patch_forward, resize_embeddings, round_trip, set_vector, quantize,
    tie, exchange_embeddings, parametrize, prune,
]  # fmt: skip


def on_adapters(change: Callable[[Any], None]) -> Change:
    """Change each layer that has adapters."""

    def change_all(model: PreTrainedModel) -> None:
        for layer in adapted_layers(model):
            change(layer)

    return change_all


ADAPTERS = {
    "another": on_adapters(lambda layer: layer.set_adapter(["two"])),
    "disabled": on_adapters(lambda layer: layer.enable_adapters(False)),
    "rescaled": on_adapters(lambda layer: layer.set_scale("one", 3.0)),
    "merged": on_adapters(lambda layer: layer.merge()),
}


def model_for(change: Change) -> PreTrainedModel:
    """A model that takes the change."""
    model = new_model("llama")
    if change is set_vector:
        model.model.layers[1].mlp = Steered(model.model.layers[1].mlp)
    return model


def around(model: PreTrainedModel, change: Change) -> list[Tensor]:
    """Logits before a change in a block, after it, and after it without graphs."""
    with duotone.enable(model, STREAM):
        found = [logits(model)]
        change(model)
        found.append(logits(model))
    with duotone.enable(model, STREAM, graphs=False):
        return [*found, logits(model)]
