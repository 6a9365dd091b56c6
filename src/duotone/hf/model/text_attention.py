"""The language model's attention implementation, by its name in transformers."""

from __future__ import annotations

from transformers import PreTrainedModel

NAME = "duotone"
# Said by torch.compile, which leaves its graph for what a cache does; fullgraph=True refuses that.
NOT_COMPILED = (
    "a QuantizedCache launches kernels of its own; compile without fullgraph=True, or leave the "
    "model as it is: duotone.enable captures decode steps as CUDA graphs."
)


def text_implementation(model: PreTrainedModel) -> str:
    """The name of the language model's attention implementation."""
    return model.config.get_text_config(decoder=True)._attn_implementation


def set_text_implementation(model: PreTrainedModel, name: str) -> None:
    """Change the language model's attention only; vision towers keep theirs."""
    text = model.config.get_text_config(decoder=True)
    names = [key for key in model.config.sub_configs if getattr(model.config, key) is text]
    model.set_attn_implementation({names[0] if names else "": name})
    if text._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} does not let its attention implementation be set: it does "
            "not go through transformers' AttentionInterface. Use the model's own cache."
        )
