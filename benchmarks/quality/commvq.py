"""CommVQ (arXiv 2506.18879) on visual tokens, simulated: codebooks that are trained for one model.

It quantizes keys before rotary positions, and values of all kv heads at once, by networks. So it is
no quantizer of `duotone`: decoded K and V stand in a 16-bit cache, and bits follow by formula.

    K   residual vector quantization of 64 pairs of channels, 12 bits a step; the centres
        (X_A - Y_B, X_B + Y_A) commute with rotations of pairs; soft assignments that harden
    V   binary codes by an encoder, times a matrix, scaled to the token's norm

As in the released code but for: V's encoder learns from errors of V alone (there from those of
outputs as well), for fewer steps, and chooses its likeliest code (there it draws one).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from benchmarks.quality.simulated import LayerInputs, changing
from duotone.hf.model.cache_argument import CACHE

PAIRS = 64  # pairs of channels of a group; all of them where there are fewer
HALF_BITS = 6  # of a code of 12 bits
STEPS = 100  # of soft assignment
TEMPERATURES = (1e-3, 1e-5)
CLOSE = 1e-5
RATE, DECAY, BETAS, WARMUP = 1e-3, 0.1, (0.9, 0.95), 100
TOKENS_OF_STEP = 4096
SCALE_BITS = 16  # of a token's norm
MOST_TOKENS = 1 << 14  # that centres are fitted to


@dataclass
class KeyCodebook:
    """Centres of all residual steps of one layer, [steps, groups, centres, 2 * pairs].

    half_bits: of a code of twice as many bits.
    """

    centres: Tensor
    half_bits: int = HALF_BITS

    @classmethod
    def fit(cls, keys: Tensor, bits: float, half_bits: int = HALF_BITS) -> "KeyCodebook":
        """Fit keys [tokens, kv_heads, head_dim] before rotary positions, as they fall."""
        rows = paired(keys.float())
        norms = rows.norm(dim=-1, keepdim=True)
        groups = _grouped(rows / norms).unbind(1)
        count = _steps_of(bits, groups[0].shape[-1], half_bits)
        made = [_residual_steps(group, norms, count, half_bits) for group in groups]
        return cls(torch.stack(made, 1), half_bits)

    def at(self, bits: float) -> "KeyCodebook":
        """Codebook of fewer bits: its first steps. No step depends on later ones."""
        count = _steps_of(bits, self.centres.shape[-1], self.half_bits)
        return KeyCodebook(self.centres[:count], self.half_bits)

    def decode(self, keys: Tensor) -> Tensor:
        """Quantize and decode keys [tokens, kv_heads, head_dim]."""
        rows = paired(keys.float())
        norms = rows.norm(dim=-1, keepdim=True)
        left = _grouped(rows / norms)
        whole = left
        for step in self.centres:
            chosen = [nearest(x, c) for x, c in zip(left.unbind(1), step, strict=True)]
            left = left - torch.stack(chosen, 1)
        decoded = (whole - left).flatten(1) * norms.half().float()
        return unpaired(decoded, keys.shape).to(keys.dtype)

    @property
    def token_bits(self) -> int:
        """Bits of a token: its codes and its norm."""
        return self.centres.shape[0] * self.centres.shape[1] * 2 * self.half_bits + SCALE_BITS


def _steps_of(bits: float, channels: int, half_bits: int) -> int:
    return int(bits * channels / (2 * half_bits))


def _grouped(rows: Tensor) -> Tensor:
    """Numbers of a token in groups, [tokens, groups, 2 * pairs]."""
    return rows.unflatten(-1, (-1, min(2 * PAIRS, rows.shape[-1])))


def paired(keys: Tensor) -> Tensor:
    """Channels i and i + d / 2 of a head next to each other, [tokens, kv_heads * head_dim]."""
    return keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(1)


def unpaired(rows: Tensor, shape: torch.Size) -> Tensor:
    """Inverse of `paired`."""
    return rows.view(*shape[:-1], -1, 2).transpose(-1, -2).reshape(shape)


def nearest(x: Tensor, centres: Tensor) -> Tensor:
    """Centre next to each row."""
    return centres[torch.cdist(x, centres).argmin(-1)]


def _residual_steps(rows: Tensor, norms: Tensor, count: int, half_bits: int) -> Tensor:
    """Centres of `count` steps, each fitted to what the steps before have left."""
    found, scale = [], 1.0
    for step in range(count):
        found.append(soft_centres(rows, norms, scale, half_bits))
        scale = scale / 10 if step % 4 == 0 else scale
        rows = rows - nearest(rows, found[-1])
    return torch.stack(found)


def soft_centres(rows: Tensor, norms: Tensor, scale: float, half_bits: int) -> Tensor:
    """The best centres on the way from soft to hard assignments (expectation, maximisation)."""
    design = design_of(half_bits).to(rows)
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(len(rows), (len(design) // 2,), generator=draw)
    centres, least = rows[start.to(rows.device)], torch.inf
    best = centres
    for step in range(STEPS + 1):
        share = max(step - 1, 0) / (STEPS - 1)
        hot = (
            1.0 if step == 0 else scale * TEMPERATURES[0] ** (1 - share) * TEMPERATURES[1] ** share
        )
        distance = torch.cdist(rows, centres)
        if step:
            error = ((rows - centres[distance.argmin(-1)]) * norms).square().mean().item()
            if error < least:
                best, least = centres, error
            elif error - least < CLOSE:
                break
        centres = fitted(rows, torch.softmax(-distance / hot, -1), design)
    return best


def temperature(progress: float) -> float:
    """Falls exponentially from the first to the last one."""
    return TEMPERATURES[0] ** (1 - progress) * TEMPERATURES[1] ** progress


def design_of(half_bits: int) -> Tensor:
    """Matrix from (X_A, Y_A) of all A to the two coordinates of all centres (A, B)."""
    size = 2**half_bits
    a, b = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    rows = 2 * torch.arange(size * size)
    design = torch.zeros(2 * size * size, 2 * size)
    design[rows, 2 * a.flatten()] += 1
    design[rows, 2 * b.flatten() + 1] -= 1
    design[rows + 1, 2 * b.flatten()] += 1
    design[rows + 1, 2 * a.flatten() + 1] += 1
    return design


def fitted(rows: Tensor, soft: Tensor, design: Tensor) -> Tensor:
    """Centres of the form of `design` next to the weighted means, by weighted least squares."""
    weights = soft.sum(0) + 1e-8
    means = (soft.T @ rows) / weights[:, None]
    both = weights.repeat_interleave(2)[:, None].double()
    wide, target = design.double(), means.unflatten(-1, (-1, 2)).transpose(1, 2).flatten(0, 1)
    normal = wide.T @ (both * wide)
    normal += 1e-9 * normal.diagonal().mean() * torch.eye(len(normal)).to(normal)
    solved = torch.linalg.solve(normal, wide.T @ (both * target.double()))
    made = (wide @ solved).unflatten(0, (-1, 2)).transpose(1, 2).flatten(1)
    return made.to(rows)


class ValueCodec(nn.Module):
    """Binary codes of V of one layer, and the matrix that decodes them."""

    def __init__(self, channels: int, bits: int, scale: Tensor) -> None:
        super().__init__()
        self.codes = channels * bits // 2  # of 2 bits each
        hidden = min(4096, 4 * self.codes)
        self.embedding = nn.Parameter(torch.randn(2 * self.codes, channels))
        self.encoder = nn.Sequential(
            nn.LayerNorm(channels),
            nn.Linear(channels, hidden),
            nn.GELU(),
            nn.Linear(hidden, 4 * self.codes),
        )
        self.register_buffer("scale", scale + 1e-6)

    def forward(self, values: Tensor) -> Tensor:
        """Decoded values [tokens, channels]; while training, codes are drawn."""
        scaled = values / self.scale
        norms = scaled.norm(dim=-1, keepdim=True)
        scores = self.encoder(scaled / (norms + 1e-6)).unflatten(-1, (-1, 4))
        if self.training:
            hot = F.gumbel_softmax(scores, tau=1.0, hard=True)
        else:
            hot = F.one_hot(scores.argmax(-1), 4).to(scores)
        decoded = self.binary(hot) @ self.embedding
        decoded = decoded / (decoded.norm(dim=-1, keepdim=True) + 1e-6)
        return decoded * norms.half().float() * self.scale

    @staticmethod
    def binary(hot: Tensor) -> Tensor:
        """Two binary digits of each choice of four: 10, 01, 11, 00."""
        return (hot[..., :2] + hot[..., 2:3]).flatten(-2)

    @property
    def token_bits(self) -> int:
        """Bits of a token: its codes and its norm."""
        return 2 * self.codes + SCALE_BITS


def trained(values: Tensor, bits: int, steps: int) -> ValueCodec:
    """Codec of values [tokens, kv_heads * head_dim], by the mean squared error of V."""
    values = values.float()
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng((values.device.type == "cuda" and [values.device]) or []):
        torch.manual_seed(0)
        codec = ValueCodec(values.shape[1], bits, values.abs().mean(0).cpu()).to(values.device)
        learner = torch.optim.AdamW(codec.parameters(), RATE, BETAS, weight_decay=DECAY)
        warm = torch.optim.lr_scheduler.LinearLR(learner, 1 / WARMUP, 1, WARMUP)
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(learner, max(1, steps - WARMUP))
        rates = torch.optim.lr_scheduler.SequentialLR(learner, [warm, fall], [WARMUP])
        for _ in range(steps):
            picked = torch.randint(len(values), (TOKENS_OF_STEP,), generator=draw)
            batch = values[picked.to(values.device)]
            loss = F.mse_loss(codec(batch), batch)
            learner.zero_grad()
            loss.backward()
            learner.step()
            rates.step()
    return codec.eval()


@dataclass
class CommVQ:
    """Codebooks of a model. layers: {layer: (of K, of V)}."""

    layers: dict[int, tuple[KeyCodebook, ValueCodec]]
    channels: int

    @classmethod
    @torch.no_grad()
    def fit(
        cls,
        model: Any,
        calls: Sequence[tuple[dict, Tensor]],
        widths: Sequence[int],
        steps: int,
        half_bits: int = HALF_BITS,
    ) -> "dict[int, CommVQ]":
        """{bits: codebooks}, fitted to visual tokens.

        calls: arguments of the model, and which tokens are visual. widths: bits of each.
        steps: of training V's codecs.
        """
        seen: dict[tuple[int, str], list[Tensor]] = {}
        for given, visual in calls:

            def keep(layer: int, which: str, x: Tensor, visual: Tensor = visual) -> Tensor:
                seen.setdefault((layer, which), []).append(x[visual])
                return x

            with changing(model, keep):
                model(**given)
        states = {name: torch.cat(parts)[:MOST_TOKENS] for name, parts in seen.items()}
        found = {bits: cls({}, next(iter(states.values()))[0].numel()) for bits in widths}
        for layer in sorted({layer for layer, _ in states}):
            key = KeyCodebook.fit(states[layer, "key"], max(widths), half_bits)
            for bits, each in found.items():
                with torch.enable_grad():
                    value = trained(states[layer, "value"].flatten(1), bits, steps)
                each.layers[layer] = (key.at(bits), value)
        return found

    @property
    def bits(self) -> float:
        """True bits of a number of K or V; codebooks belong to the model and do not count."""
        key, value = next(iter(self.layers.values()))
        return (key.token_bits + value.token_bits) / (2 * self.channels)

    @torch.no_grad()
    def cache(self, model: Any, given: dict, visual: Tensor) -> Cache:
        """16-bit cache after `given`, with visual tokens decoded; attention there was exact."""

        def decoded(layer: int, which: str, x: Tensor) -> Tensor:
            part = x[visual]
            key, value = self.layers[layer]
            rows = key.decode(part) if which == "key" else value(part.flatten(1).float())
            out = x.clone()
            out[visual] = rows.view_as(part).to(x.dtype)
            return out

        inputs = LayerInputs(model.get_decoder().layers)
        with inputs.kept():
            model(**given)
        cache = DynamicCache(config=model.config.get_text_config())
        with inputs.replaced(), changing(model, decoded):
            model(**given, **{CACHE: cache})
        return cache
