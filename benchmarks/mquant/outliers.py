"""The outliers of large models, put into a small one without changing what it computes.

A channel of the gated MLP may be scaled where it is made (a row of up_proj) and scaled back where
it is read (a column of down_proj). Large models have such channels, some hundred times their
neighbours and mostly at visual tokens (MQuant's Fig. 1; "massive activations", arXiv 2402.17762);
duotone-tiny has none. Factors are powers of two, so that the 16-bit model stays bit for bit equal
but for overflow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from duotone.hf.weights.weight_maps import weight_map
from duotone.loading import visual_mask
from duotone.quantize.calibration import Tensors
from duotone.weights.equivalences.module_map import at

from ..stress import check_factor

CHANNELS = 4


@torch.no_grad()
def grow_outliers(
    model: nn.Module, batches: Sequence[Tensors], factor: float, channels: int = CHANNELS
) -> list[list[int]]:
    """Scale `channels` channels of every MLP of the language model by `factor`, in place.

    The ones whose largest value at visual tokens exceeds the largest at text tokens the most, of
    those that are not small. Returns them, layer by layer.
    Errors: ValueError for a factor that is no power of two, and for MLPs without an up_proj of
    their own.
    """
    check_factor(factor)
    blocks = weight_map(model).stream("language").blocks
    if any(not (block.up or "").endswith("up_proj") or "gate" in block.up for block in blocks):
        raise ValueError(f"outliers are grown in up_proj, got an MLP with {blocks[0].up!r}")
    peaks = _peaks(model, batches, [block.mlp_output for block in blocks])
    chosen = []
    for block in blocks:
        visual, text = peaks[block.mlp_output]
        ratio = torch.where(visual >= visual.median(), visual / text, 0)
        found = ratio.topk(channels).indices
        at(model, block.up).weight[found] *= factor
        at(model, block.mlp_output).weight[:, found] /= factor
        chosen.append(found.tolist())
    return chosen


def _peaks(model: nn.Module, batches: Sequence[Tensors], paths: list[str]) -> dict[str, Tensor]:
    """{path: largest magnitudes [visual and text, channels] of a linear's inputs}."""
    peaks: dict[str, Tensor] = {}
    rows: list[Tensor] = []
    handles = []
    for path in paths:

        def keep(module: nn.Module, args: tuple[Tensor], path: str = path) -> None:
            x = args[0].flatten(0, -2).abs().float()
            seen = torch.stack([x[mask].amax(0) for mask in rows])
            peaks[path] = seen if path not in peaks else torch.maximum(peaks[path], seen)

        handles.append(at(model, path).register_forward_pre_hook(keep))
    try:
        for batch in batches:
            batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
            real = batch["attention_mask"].bool().flatten()
            visual = visual_mask(model.config, batch["input_ids"]).flatten()
            rows[:] = [visual & real, ~visual & real]
            model(**batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return peaks
