"""Norms without weights: weight and bias move to the linears after the norm; the mean is dropped.

    norm(x) = gamma * n(x) + beta   ->   W norm(x) + b = (W gamma) n(x) + (b + W beta)

LayerNorm is RMSNorm of the centred x. Where every reader of a residual stream normalises each token
by itself, the mean of the stream has no effect. Writing centred rows (W - mean over outputs) then
turns its LayerNorms into RMSNorms exactly (SliceGPT; MQuant A.13). MQuant's code does so for
InternVL, too, whose projector normalises four tokens together: there it is not exact. Here such a
stream keeps its mean (`weights.equivalences.residual`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone.weights.equivalences.module_map import set_data


class RMSNorm(nn.Module):
    """x / rms(x), times weight plus bias where given; at least fp32 inside, bfloat16 included."""

    def __init__(self, eps: float, weight: Tensor | None = None, bias: Tensor | None = None):
        super().__init__()
        self.eps = eps
        for name, value in (("weight", weight), ("bias", bias)):
            given = None if value is None else nn.Parameter(value.detach(), requires_grad=False)
            self.register_parameter(name, given)

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> the same, in x's type."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        y = y if self.weight is None else y * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        """Options that are not parameters."""
        return f"eps={self.eps}, weight={self.weight is not None}, bias={self.bias is not None}"


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) without weight and bias."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> the same, in x's type."""
        return F.layer_norm(x, x.shape[-1:], eps=self.eps)

    def extra_repr(self) -> str:
        """The eps."""
        return f"eps={self.eps}"


@dataclass(frozen=True)
class NormParts:
    """Parts of a norm module; weight and bias in float64.

    weight: factor of the normalised x, `offset` + the module's own weight.
    offset: 1 where the module multiplies by 1 + weight (Gemma), else 0.
    """

    centres: bool
    eps: float
    weight: Tensor
    bias: Tensor | None
    offset: float = 0.0

    def plain(self, centres: bool | None = None) -> nn.Module:
        """The norm without weight and bias; `centres` overrides whether it takes off the mean."""
        keeps = self.centres if centres is None else centres
        return LayerNorm(self.eps) if keeps else RMSNorm(self.eps)


def norm_parts(norm: nn.Module) -> NormParts:
    """Take a LayerNorm or RMSNorm apart. Errors: ValueError for any other module.

    What a module is comes from what it computes, not from its name.
    """
    eps = next((getattr(norm, n) for n in ("eps", "variance_epsilon") if hasattr(norm, n)), None)
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    is_vector = isinstance(weight, Tensor) and weight.dim() == 1
    kind = _kind(norm, eps) if is_vector and isinstance(eps, float) else None
    if kind is None:
        raise ValueError(
            "expected a LayerNorm or RMSNorm that multiplies by its weight or by 1 + weight; got "
            f"{type(norm).__name__}. A folded norm has no weight left; other norms cannot be taken "
            "apart: choose a recipe that leaves them alone."
        )
    centres, offset = kind
    gain = offset + weight.data.double()
    return NormParts(centres, eps, gain, None if bias is None else bias.data.double(), offset)


@torch.no_grad()
def _kind(norm: nn.Module, eps: float) -> tuple[bool, float] | None:
    """(takes the mean off, offset of the weight) by the outputs for weights 0 and 1.

    Half of the probes are as small as the square root of eps, which they see. None for a module
    whose outputs are of no known kind.
    """
    # A module without numbers yet is known by those that it is given here.
    device = "cpu" if norm.weight.is_meta else norm.weight.device
    channels = len(norm.weight)
    generator = torch.Generator().manual_seed(0)
    x = 0.5 + torch.randn(4, channels, generator=generator)
    x = torch.cat([x, x * eps**0.5]).to(device)

    def outputs(value: float) -> Tensor:
        given = {"weight": torch.full((channels,), value, device=device)}
        if getattr(norm, "bias", None) is not None:
            given["bias"] = torch.zeros(channels, device=device)
        return torch.func.functional_call(norm, given, (x,))

    try:
        found = [outputs(0.0), outputs(1.0)]
    except (TypeError, RuntimeError):
        return None  # Its forward wants more than x.
    for plain in (RMSNorm(eps), LayerNorm(eps)):
        y = plain(x)
        for offset in (0.0, 1.0):
            pairs = zip(found, (offset * y, (1 + offset) * y), strict=True)
            if all(a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5) for a, b in pairs):
                return isinstance(plain, LayerNorm), offset
    return None


def fold_norm(parts: NormParts, module: nn.Module) -> None:
    """Give the norm's weight and bias to a linear that reads k >= 1 normalised tokens at once.

    Or to a convolution over tokens, whose input channels are the norm's. Errors: ValueError where
    the module's inputs are no multiple of the norm's.
    """
    weight = module.weight.data.double()
    copies, rest = divmod(weight.shape[1], len(parts.weight))
    if rest:
        raise ValueError(
            f"a linear after a norm of {len(parts.weight)} channels must read a multiple of "
            f"them; got {weight.shape[1]} inputs."
        )
    along_inputs = (1, -1, *(1,) * (weight.dim() - 2))
    if parts.bias is not None:
        add_bias(module, (weight * parts.bias.repeat(copies).view(along_inputs)).flatten(1).sum(1))
    set_data(module.weight, weight * parts.weight.repeat(copies).view(along_inputs))


def add_bias(linear: nn.Module, bias: Tensor) -> None:
    """bias += `bias` [out]; a linear without one gets it."""
    if linear.bias is None:
        new = bias.to(dtype=linear.weight.dtype, device=linear.weight.device)
        linear.bias = nn.Parameter(new, requires_grad=linear.weight.requires_grad)
    else:
        set_data(linear.bias, linear.bias.data.double() + bias)


def centring(channels: int, device: torch.device | str | None = None) -> Tensor:
    """I - 1 1^T / n [n, n] in float64: takes the mean off a token."""
    eye = torch.eye(channels, dtype=torch.float64, device=device)
    return eye - 1 / channels
