"""Models with LoRA adapters "one" and "two": PEFT's own layers, or small ones with PEFT's names."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from families import new_model

NAMES = ("one", "two")
TARGETS = ("q_proj", "k_proj", "v_proj")
RANK, ALPHA = 2, 4
NEEDS_PEFT = (
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs peft"),
    # Asked by PEFT itself.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
)


class LoraLinear(nn.Module):
    """The attributes and methods of `peft.tuners.lora.Linear` that change its numbers."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scaling = dict.fromkeys(NAMES, ALPHA / RANK)
        size = base_layer.weight.shape
        self.lora_A = nn.ModuleDict({n: nn.Linear(size[1], RANK, bias=False) for n in NAMES})
        self.lora_B = nn.ModuleDict({n: nn.Linear(RANK, size[0], bias=False) for n in NAMES})
        self.merged_adapters: list[str] = []
        self._disable_adapters, self._active_adapter = False, [NAMES[0]]

    @property
    def active_adapters(self) -> list[str]:
        return self._active_adapter

    @property
    def disable_adapters(self) -> bool:
        return self._disable_adapters

    def set_adapter(self, names: list[str]) -> None:
        self._active_adapter = names

    def enable_adapters(self, enabled: bool) -> None:
        self._disable_adapters = not enabled

    def set_scale(self, name: str, scale: float) -> None:
        self.scaling[name] = scale * ALPHA / RANK

    def merge(self) -> None:
        for name in self.active_adapters:
            self.base_layer.weight.data += self._delta(name)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        while self.merged_adapters:
            self.base_layer.weight.data -= self._delta(self.merged_adapters.pop())

    def _delta(self, name: str) -> Tensor:
        return self.lora_B[name].weight @ self.lora_A[name].weight * self.scaling[name]

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        if self.disable_adapters or self.merged_adapters:
            return out
        for name in self.active_adapters:
            out = out + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return out


def _decoder_linears(model: PreTrainedModel) -> Iterable[tuple[nn.Module, str]]:
    for module in model.get_decoder().modules():
        yield from ((module, name) for name in TARGETS if hasattr(module, name))


def _filled(model: PreTrainedModel) -> PreTrainedModel:
    """Adapters begin with zeros in B; here all have numbers."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    return model.eval()


def stand_in(family: str) -> PreTrainedModel:
    model = new_model(family)
    for module, name in list(_decoder_linears(model)):
        setattr(module, name, LoraLinear(getattr(module, name)))
    return _filled(model)


def wrapped_by_peft(family: str) -> Any:
    """PEFT's wrapper of the model."""
    from peft import LoraConfig, get_peft_model

    model = new_model(family)
    paths = {module: path for path, module in model.named_modules()}
    targets = [f"{paths[module]}.{name}" for module, name in _decoder_linears(model)]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)
    wrapper = get_peft_model(model, config, adapter_name=NAMES[0])
    wrapper.add_adapter(NAMES[1], config)
    _filled(model)
    return wrapper


def by_peft(family: str) -> PreTrainedModel:
    return wrapped_by_peft(family).get_base_model()


MAKERS = (stand_in, pytest.param(by_peft, marks=NEEDS_PEFT))


def hotswap(wrapper: Any, folder: Path) -> None:
    """Load the second adapter, with another scaling, in place of the first one."""
    from peft.utils.hotswap import hotswap_adapter

    wrapper.peft_config[NAMES[1]].lora_alpha = 3 * ALPHA
    wrapper.save_pretrained(folder, selected_adapters=[NAMES[1]], save_embedding_layers=False)
    hotswap_adapter(wrapper, str(folder / NAMES[1]), NAMES[0], torch_device=str(wrapper.device))


def adapted_layers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]
