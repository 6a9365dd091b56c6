"""Equivalences on a whole residual stream: fold its norms, rotate it, or rotate its readers.

Three cases, all exact:

- RMSNorm before each branch (decoders, Qwen2.5-VL's tower): any orthogonal Q.
- LayerNorm before each branch: if every reader normalises each token by itself, the stream is
  centred and its norms become RMSNorms. If the mean is read, the norms stay LayerNorms without
  weight, and Q keeps the ones vector. LLaVA's projector reads the stream itself. InternVL's
  projector and Qwen3-VL's DeepStack mergers normalise four tokens at once.
- A norm on a branch's output (post-norm, sandwich): its weight fixes the basis of each branch, so
  the stream stays as it is. MQuant's A.14 rotates it with two D x D products per block on the
  residual. We put an online Hadamard before the branch's linears, with the same effect on their
  inputs. The transform takes D (m + log2 p) additions instead of 2 D^2 multiplications. LayerNorms
  there become RMSNorms by centring the linear before the norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from duotone.weights.equivalences.hadamard import plan_hadamard
from duotone.weights.equivalences.module_map import Branch, Reader, Stream, at, put
from duotone.weights.equivalences.norms import RMSNorm, centring, fold_norm, norm_parts
from duotone.weights.equivalences.online import rotate_online
from duotone.weights.equivalences.rotation import (
    check_orthogonal,
    fold_scale,
    keeping_mean,
    map_output,
    map_rows,
    random_hadamard,
    turn_input,
)


@torch.no_grad()
def rotate_stream(model: nn.Module, stream: Stream, q: Tensor | None = None, seed: int = 0) -> None:
    """Fold the norms of `stream` and rotate it by Q (None: a random-sign Hadamard), in place.

    The model computes the same function. q: [channels, channels] float64, orthogonal; where the
    mean is read, the matrix used is `keeping_mean(q)`. Errors: ValueError for a Q that is not
    orthogonal, and for a stream that cannot be rotated (post-norm: `rotate_branch_inputs`).
    """
    if not stream.is_rotatable:
        raise ValueError(
            f"the {stream.name} stream normalises what its branches add, which fixes its basis; "
            "use rotate_branch_inputs."
        )
    device = at(model, stream.blocks[0].mlp_output).weight.device
    keeps = mean_is_read(model, stream)
    centre = has_layer_norms(model, stream) and not keeps
    q = _rotation(stream.channels, q, seed, keeps, device)
    into = q @ centring(stream.channels, device) if centre else q
    _fold_scales(model, stream)
    _replace_entry(model, stream, into)
    fold_norms(model, stream, centred=centre)
    _turn_writers(model, stream, into)
    for path in reading_linears(stream):
        turn_input(at(model, path), q)
    for path in stream.outside:
        put(model, path, _turned_back(at(model, path), q))


def _rotation(
    channels: int, q: Tensor | None, seed: int, keeps: bool, device: torch.device
) -> Tensor:
    """Q on the model's device, without numbers for a model without numbers."""
    if device.type == "meta":
        return torch.empty(channels, channels, dtype=torch.float64, device=device)
    q = random_hadamard(channels, seed) if q is None else q
    check_orthogonal(q, channels)
    return (keeping_mean(q) if keeps else q).to(device)


@torch.no_grad()
def fold_norms(model: nn.Module, stream: Stream, centred: bool = False) -> None:
    """Move weights and biases of all norms into the linears after them; leave the norms plain.

    centred: tokens written to the stream have no mean, so that LayerNorms become RMSNorms.
    """
    for norm, linears in _normed_readers(stream):
        parts = norm_parts(at(model, norm))
        for path in linears:
            fold_norm(parts, at(model, path))
        put(model, norm, parts.plain(centres=parts.centres and not centred))


@torch.no_grad()
def rotate_branch_inputs(model: nn.Module, stream: Stream) -> None:
    """Put an online Hadamard before each branch's linears, for streams that are not rotated.

    Norms in front are folded; LayerNorms on a branch's output become RMSNorms with weight and bias
    by centring that linear.
    """
    _fold_scales(model, stream)
    fold_norms(model, stream)
    plan = plan_hadamard(stream.channels, pad=False)
    for block in stream.blocks:
        for branch in block.branches:
            _centre_output(model, branch)
            for path in branch.inputs:
                rotate_online(model, path, plan)


def _centre_output(model: nn.Module, branch: Branch) -> None:
    if branch.output_norm is None:
        return
    norm = at(model, branch.output_norm)
    parts = norm_parts(norm)
    if parts.centres:
        linear = at(model, branch.output)
        map_output(linear, centring(linear.out_features, linear.weight.device))
        put(model, branch.output_norm, RMSNorm(parts.eps, norm.weight, norm.bias))


def has_layer_norms(model: nn.Module, stream: Stream) -> bool:
    """True if the blocks' norms subtract the mean."""
    return any(
        branch.norm is not None and norm_parts(at(model, branch.norm)).centres
        for block in stream.blocks
        for branch in block.branches
    )


def mean_is_read(model: nn.Module, stream: Stream) -> bool:
    """True if some reader sees the mean of a token of a LayerNorm stream."""
    return has_layer_norms(model, stream) and any(
        _sees_mean(model, stream, reader) for reader in stream.readers
    )


def _sees_mean(model: nn.Module, stream: Stream, reader: Reader) -> bool:
    if reader.norm is None:
        return True
    parts = norm_parts(at(model, reader.norm))
    return not parts.centres or len(parts.weight) != stream.channels


def _normed_readers(stream: Stream) -> list[tuple[str, tuple[str, ...]]]:
    branches = [branch for block in stream.blocks for branch in block.branches]
    inner = [(b.norm, b.inputs) for b in branches if b.norm is not None]
    return inner + [(r.norm, r.linears) for r in stream.readers if r.norm is not None]


def reading_linears(stream: Stream) -> list[str]:
    """Paths of all linears that read the stream, after a norm or directly."""
    branches = [branch for block in stream.blocks for branch in block.branches]
    inner = [path for branch in branches for path in branch.inputs]
    return inner + [path for reader in stream.readers for path in reader.linears]


def _fold_scales(model: nn.Module, stream: Stream) -> None:
    for block in stream.blocks:
        for branch in block.branches:
            if branch.scale is not None:
                fold_scale(at(model, branch.output), at(model, branch.scale))


def _turn_writers(model: nn.Module, stream: Stream, into: Tensor) -> None:
    inner = [branch.output for block in stream.blocks for branch in block.branches]
    for path in (*inner, *stream.writers):
        map_output(at(model, path), into)
    for path in stream.tables:
        map_rows(at(model, path).weight, into)
    for path in stream.vectors:
        map_rows(at(model, path), into)


def _replace_entry(model: nn.Module, stream: Stream, into: Tensor) -> None:
    """A norm whose output is the stream needs a D x D linear: M (gamma n + beta)."""
    if stream.entry_norm is None:
        return
    norm = at(model, stream.entry_norm)
    parts = norm_parts(norm)
    linear = _linear_like(norm.weight, into * parts.weight)
    if parts.bias is not None:
        bias = (into @ parts.bias).to(norm.weight.dtype)
        linear.bias = nn.Parameter(bias, requires_grad=norm.weight.requires_grad)
    put(model, stream.entry_norm, nn.Sequential(parts.plain(), linear))


def _turned_back(module: nn.Module, q: Tensor) -> nn.Module:
    """`module` after Q^T, so that it reads the stream in its first basis."""
    return nn.Sequential(_linear_like(next(module.parameters()), q.T.contiguous()), module)


def _linear_like(parameter: Tensor, weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    given = weight.to(dtype=parameter.dtype, device=parameter.device)
    linear.weight = nn.Parameter(given, requires_grad=parameter.requires_grad)
    return linear
