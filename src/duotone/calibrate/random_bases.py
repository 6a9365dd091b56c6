"""A spec as calibration makes it, with random bases: for times, which no basis changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duotone.hf.model.facts import model_facts
from duotone.hf.model.fingerprint import fingerprint
from duotone.hf.model.spec_checks import check_spec
from duotone.quant import CacheSpec
from duotone.quant.bases import Bases

from .budget import widths_of
from .run import spec_with
from .settings import TEXT_BITS, Settings
from .text import joined, no_pictures

# Variances of a span's channels fall by this factor from the first one to the last; those of its
# background are this share of the foreground's.
FALL, BACKGROUND = 1e-3, 0.1


def random_bases(model: Any, file: str | Path, settings: Settings | None = None) -> CacheSpec:
    """A calibrated spec for a model, whose random orthogonal bases are written to `file`.

    Widths are `allocate`'s for variances that fall geometrically, alike in all layers.
    """
    facts, settings = model_facts(model), settings or Settings()
    kv_heads, head_dim = facts.shape.kv_heads, facts.shape.head_dim
    parts = settings.parts(facts)
    falling = FALL ** (torch.arange(head_dim, dtype=torch.float64) / head_dim)
    spectra = {
        (layer, which, part): falling * (BACKGROUND if part == "background" else 1)
        for layer in range(facts.layers)
        for which in ("key", "value")
        for part in parts
    }
    size = (facts.layers, kv_heads, head_dim)
    draw = torch.Generator().manual_seed(int("text" in parts))
    key, value = (_orthogonal(size, draw) for _ in range(2))
    Bases(key, value, {"fingerprint": fingerprint(model), **facts.signature()}).save(file)
    spec = spec_with(
        facts, widths_of(spectra, settings.code_bits(parts), parts), str(file), settings
    )
    check_spec(facts, spec)
    return spec


def random_bases_with_text(
    model: Any, folder: Path, settings: Settings | None = None, bits: float = TEXT_BITS
) -> CacheSpec:
    """A spec of calibrated pictures and text of so many code bits, with random bases in `folder`.

    settings: of the pictures, whose constants of streams hold. Errors: ValueError for a model
    without pictures.
    """
    facts, settings = model_facts(model), settings or Settings()
    if not facts.is_multimodal:
        raise no_pictures(facts.model_type)
    pictures = random_bases(model, folder / "pictures.safetensors", settings)
    streams = replace(settings, bits=bits, regularization=None, text=True)
    text = random_bases(model, folder / "text.safetensors", streams)
    return joined(text, pictures, facts.layers)


def _orthogonal(size: tuple[int, int, int], draw: torch.Generator) -> Tensor:
    """Random orthogonal matrices [layers, kv_heads, head_dim, head_dim]."""
    return torch.linalg.qr(torch.randn(*size, size[-1], generator=draw))[0]
