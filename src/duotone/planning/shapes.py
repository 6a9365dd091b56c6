"""Caches of known models, by name: what a plan needs of a configuration."""

from __future__ import annotations

from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.layers import LayerShape


def _facts(
    name: str, layers: int, q_heads: int, kv_heads: int = 8, head_dim: int = 128
) -> ModelFacts:
    return ModelFacts(
        model_type=name,
        shapes=(LayerShape(q_heads, kv_heads, head_dim),) * layers,
        element_bytes=2,
        sliding=(False,) * layers,
        visual_token_ids=(0,),
    )


# Language models of CalibQuant's tables (InternVL2.5, arXiv 2412.05271).
SHAPES = {
    facts.model_type: facts
    for facts in (_facts("internvl2.5-8b", 32, 32), _facts("internvl2.5-26b", 48, 48))
}
SHAPE_8B = SHAPES["internvl2.5-8b"]
