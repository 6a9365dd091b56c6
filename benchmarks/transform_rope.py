"""Calibration of keys before RoPE, for `transform_alternatives.py`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transform_calibrations import Calibrator, Moments, hear
from transform_coders import rotated

from duotone import CacheSpec
from duotone.calibrate import Settings
from duotone.calibrate.moments import LayerMoments, centred_sums
from duotone.calibrate.profiles import ProfileRecorder


def theta_of(model: Any) -> float:
    """The base of RoPE's angles."""
    return float(model.config.get_text_config(decoder=True).rope_parameters["rope_theta"])


def places(recorder: Any) -> Tensor:
    """Positions [batch, tokens] of the batch that is heard."""
    return (recorder.batch.attention_mask.cumsum(-1) - 1).clamp(min=0)


class KeySums:
    """Moments of keys before RoPE, and how often pictures' tokens stand at each position."""

    batch = places = None

    def __init__(self, layers: int, theta: float) -> None:
        self.sums, self.theta = [0.0] * layers, theta
        self.counts: dict[int, int] = {}

    def record(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: Any) -> None:
        """One layer of one prompt."""
        positions, spans = places(self), self.places.spans.to(key.device)
        self.sums[module.layer_idx] += centred_sums(rotated(key, positions, self.theta, -1), spans)
        if module.layer_idx == 0:
            for place, count in zip(*positions[spans >= 0].unique(return_counts=True), strict=True):
                self.counts[int(place)] = self.counts.get(int(place), 0) + int(count)


def metric_before(query: Tensor, counts: dict[int, int], theta: float) -> Tensor:
    """Mean over positions of R_t M R_t^T: what an error of a key costs before it is turned."""
    at = torch.tensor(list(counts))
    share = torch.tensor(list(counts.values()), dtype=torch.float64)
    size = query.shape[-1]
    eye = torch.eye(size).expand(1, len(at), size, size)
    # Row i of the matrix of a position is the i-th unit vector, turned.
    turns = rotated(eye.flatten(1, 2)[None], at.repeat_interleave(size)[None], theta)
    turns = turns.view(len(at), size, size).double()
    metric = query.double().cpu()
    made = [
        (share[:, None, None] * (turns @ one @ turns.mT)).sum(0) / share.sum() for one in metric
    ]
    return torch.stack(made)


def moments_before(maker: Calibrator, theta: float) -> Moments:
    """The maker's moments with those of keys before RoPE."""
    heard = KeySums(len(maker.moments), theta)
    hear(maker.loaded.model, maker.batches, heard)
    made: list[LayerMoments] = []
    for layer, sums in zip(maker.moments, heard.sums, strict=True):
        query = metric_before(layer.query, heard.counts, theta)
        made.append(replace(layer, key=sums.cpu(), query=query))
    return made


def spec_before(maker: Calibrator, settings: Settings, theta: float) -> CacheSpec:
    """A spec whose bases and widths are of keys before RoPE."""

    class Turned(ProfileRecorder):
        """Profiles of keys before RoPE."""

        batch = None

        def record(self, module: Any, query: Tensor, key: Tensor, *rest: Any) -> None:
            key = rotated(key, places(self), theta, -1)
            super().record(module, query, key, *rest)

    moments: Sequence[LayerMoments] = moments_before(maker, theta)
    return maker.spec("before RoPE", settings, moments=moments, listener=Turned)
