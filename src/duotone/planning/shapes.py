"""Sizes of a decoder, and tokens of its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from duotone.hf.facts import ModelFacts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a language model's decoder with gated MLPs."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    element_bytes: int = 2

    @classmethod
    def of(cls, config: PreTrainedConfig) -> DecoderShape:
        """Build from a model's config. Errors: ValueError where the config lacks a size."""
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        sizes = {"hidden": "hidden_size", "mlp": "intermediate_size", "vocab": "vocab_size"}
        found = {name: getattr(text, field, None) for name, field in sizes.items()}
        missing = [sizes[name] for name, value in found.items() if not isinstance(value, int)]
        if missing:
            raise ValueError(
                f"step times need a decoder with one MLP size; {config.model_type!r} has no "
                f"{missing}. Plan the memory alone with duotone.plan."
            )
        return cls(
            name=config.model_type,
            layers=text.num_hidden_layers,
            q_heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            **found,
        )

    @property
    def facts(self) -> ModelFacts:
        """The shape of its cache."""
        return ModelFacts(
            model_type=self.name,
            layers=self.layers,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            element_bytes=self.element_bytes,
            sliding=(False,) * self.layers,
            visual_token_ids=(0,),
        )

    @property
    def read_weights(self) -> int:
        """Numbers of all matrices that a step multiplies with."""
        heads = (2 * self.q_heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (heads + 3 * self.mlp) + self.hidden * self.vocab

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, embedding included."""
        return (self.read_weights + self.hidden * self.vocab) * self.element_bytes


# Language models of the papers' tables (InternVL2.5, arXiv 2412.05271).
SHAPES = {
    shape.name: shape
    for shape in (
        DecoderShape("internvl2.5-8b", 32, 4096, 32, 8, 128, 14336, 92553),
        DecoderShape("internvl2.5-26b", 48, 6144, 48, 8, 128, 16384, 92553),
    )
}


@dataclass(frozen=True)
class Load:
    """Tokens of every sequence: visual and text ones of the prompt, generated ones.

    images: equal runs that the visual tokens come in, as `duotone.plan` takes them.
    """

    visual: int
    prompt: int
    new: int
    images: int = 1

    @property
    def tokens(self) -> int:
        """Number of all tokens."""
        return self.visual + self.prompt + self.new
