"""Tables of this repository's benchmarks: `duotone report` finds them through pyproject.toml."""

from .mquant import (
    decode_table,
    model_table,
    paper_table,
    prefill_table,
    static_table,
)
from .mquant_quality import memory_table, modality_table, split_table
from .mquant_quality import quality_table as mquant_quality_table

# {name of the table: (schema of its result files, function that renders them)}
RENDERERS = {
    "mquant-prefill": ("duotone.mquant.speed/1", prefill_table),
    "mquant-static": ("duotone.mquant.speed/1", static_table),
    "mquant-decode": ("duotone.mquant.speed/1", decode_table),
    "mquant-model": ("duotone.mquant.model/1", model_table),
    "mquant-paper": ("duotone.mquant.speed/1", paper_table),
    "mquant-quality": ("duotone.mquant.quality/1", mquant_quality_table),
    "mquant-split": ("duotone.mquant.split/1", split_table),
    "mquant-memory": ("duotone.mquant.memory/1", memory_table),
    "mquant-modality": ("duotone.mquant.modality/1", modality_table),
}
