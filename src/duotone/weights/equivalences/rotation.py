"""Rotation of a residual stream: x' = M x, applied to every writer and every reader.

    writers   W' = M W, b' = M b          embeddings, vectors: rows e' = M e
    readers   W' = W Q^T                  (per token, where a linear reads several)

Q is orthogonal, M is Q or, where the stream is centred too, Q (I - 1 1^T / n). RMSNorm without
weight commutes with Q, LayerNorm without weight commutes with those Q that keep the ones vector
(`keeping_mean`). All products are taken in float64 and cast back (QuaRot; MQuant 3.1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from duotone.weights.equivalences.hadamard import exact_plan, transform
from duotone.weights.equivalences.module_map import set_data

# Rows per float64 product: a vocabulary of 150,000 rows would need gigabytes at once.
ROWS_AT_ONCE = 16384


def random_hadamard(channels: int, seed: int = 0, device: str | None = None) -> Tensor:
    """Q [n, n] float64 = H D, D random signs; blocks where no H of that size is known.

    Q costs nothing at run time. Sizes without a Hadamard matrix get an orthogonal matrix from the
    QR of a Gaussian matrix instead of padding.
    """
    plan = exact_plan(channels)
    if plan is None:
        return random_orthogonal(channels, seed).to(device)
    eye = torch.eye(channels, dtype=torch.float64)
    return transform(eye * _random_signs(channels, seed), plan).T.contiguous().to(device)


def _random_signs(size: int, seed: int) -> Tensor:
    """[size] of +-1, float64; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1


def random_orthogonal(channels: int, seed: int = 0) -> Tensor:
    """Q [n, n] float64, Haar-distributed: QR of a Gaussian matrix with R's diagonal positive."""
    generator = torch.Generator().manual_seed(seed)
    gauss = torch.randn(channels, channels, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gauss)
    return q * r.diagonal().sign()


def keeping_mean(q: Tensor) -> Tensor:
    """An orthogonal matrix near Q that keeps the ones vector: Q' 1 = 1.

    Q, then the Householder reflection that brings Q 1 back to 1. With it LayerNorm(Q' x) = Q'
    LayerNorm(x), so that a stream whose mean is read can be rotated as well. Samsung/TICO rotates
    the zero-mean subspace to the same end.
    """
    n = len(q)
    ones = q.new_ones(n)
    v = q @ ones - ones
    length = v.square().sum()
    # Q 1 = 1 already: there is nothing to reflect, and 0 / 0 otherwise.
    return q if length < 1e-24 * n else q - torch.outer(v, v @ q) * (2 / length)


def check_orthogonal(q: Tensor, channels: int) -> None:
    """Raise ValueError unless Q is orthogonal, float64 and of that size."""
    if q.shape != (channels, channels) or q.dtype != torch.float64:
        raise ValueError(
            f"a rotation of {channels} channels must be float64 [{channels}, {channels}]; "
            f"got {q.dtype} {tuple(q.shape)}."
        )
    error = (q @ q.T - torch.eye(channels, dtype=q.dtype, device=q.device)).abs().max()
    if error > 1e-10:
        raise ValueError(f"a rotation must be orthogonal; Q Q^T differs from I by {error:.1e}.")


def map_output(module: nn.Module, m: Tensor) -> None:
    """y' = M y for a linear or convolution, its bias included."""
    weight = module.weight
    flat = weight.data.flatten(1).double()
    set_data(weight, (m.to(flat) @ flat).view_as(weight))
    if module.bias is not None:
        set_data(module.bias, m.to(flat) @ module.bias.data.double())


def map_rows(rows: Tensor, m: Tensor) -> None:
    """e' = M e for every row e of a parameter [..., channels], in place."""
    flat = rows.data.reshape(-1, rows.shape[-1])
    m = m.to(rows.device)
    pieces = [(part.double() @ m.T).to(rows.dtype) for part in flat.split(ROWS_AT_ONCE)]
    set_data(rows, torch.cat(pieces).view_as(rows))


def turn_input(module: nn.Module, q: Tensor) -> None:
    """W' = W Q^T for a linear that reads k tokens at once, or a convolution over tokens.

    Errors: ValueError where the inputs are no multiple of Q's size.
    """
    weight = module.weight
    channels = len(q)
    if weight.shape[1] % channels:
        raise ValueError(
            f"a reader of a stream of {channels} channels must read a multiple of them; "
            f"got {weight.shape[1]} inputs."
        )
    # A convolution's input channels are dimension 1 as well, and come last for the product.
    last = weight.data.movedim(1, -1)
    rotated = last.clone().unflatten(-1, (-1, channels))
    map_rows(rotated, q)
    set_data(weight, rotated.flatten(-2).movedim(-1, 1))


def fold_scale(linear: nn.Linear, scale: nn.Parameter) -> None:
    """Fold LayerScale into the linear before it: y * scale; the parameter becomes ones."""
    map_output(linear, torch.diag(scale.data.double()))
    scale.data.fill_(1)


def untie(embedding: nn.Embedding, head: nn.Linear) -> bool:
    """Give the head its own copy of a weight that it shares with the embedding; True if copied."""
    if head.weight is not embedding.weight:
        return False
    copy = embedding.weight.data.clone()
    head.weight = nn.Parameter(copy, requires_grad=embedding.weight.requires_grad)
    return True
