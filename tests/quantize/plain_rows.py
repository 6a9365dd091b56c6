"""Rows of the quality table in plain torch, float64: GPTQ, SmoothQuant and online Hadamards."""

import torch

from duotone.weights.equivalences.hadamard import transform


def plain_gptq(weight, moments, scale, high, damping=0.01):
    """Codes [out, in] of a weight with scales [out], column by column by falling moment.

    The inverse is of all columns that are left (OBQ), where the library has one Cholesky factor.
    """
    w, h = weight.double().clone(), moments.double()
    mean = h.diagonal().mean()
    inverse = torch.linalg.inv(h + torch.eye(len(h), dtype=torch.float64) * damping * mean)
    codes, scale = torch.empty_like(w), scale.double()
    low = -8 if high == 7 else -high
    for column in h.diagonal().argsort(descending=True, stable=True).tolist():
        codes[:, column] = (w[:, column] / scale).round().clamp(low, high)
        wrong = (w[:, column] - codes[:, column] * scale) / inverse[column, column]
        w -= wrong[:, None] * inverse[column]
        inverse = inverse - inverse[:, [column]] @ inverse[[column]] / inverse[column, column]
    return codes


def matrix_of(plan):
    """T [padded, size] of an online Hadamard."""
    return transform(torch.eye(plan.size, dtype=torch.float64), plan).T


def inputs_of(model, path, batches):
    """Inputs [rows, in] of the linear at `path`, float64, without padding."""
    kept, real = [], []
    hook = model.get_submodule(path).register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        for batch in batches:
            model(**batch, use_cache=False)
            real.append(batch["attention_mask"].bool())
    hook.remove()
    return torch.cat([x[mask] for x, mask in zip(kept, real, strict=True)]).double()


def per_token(x):
    """Int8 values of x [rows, in], a scale per row."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale
