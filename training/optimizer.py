"""Muon for the matrices of the layers, AdamW for everything else.

Muon (Keller Jordan, 2024) replaces a matrix's momentum by its nearest semi-orthogonal matrix. All
matrices of one shape are orthogonalized in one batch, or the many small launches would cost more
than the forward pass of a model this small.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of a batch of matrices towards one (quintic Newton-Schulz)."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized, with decoupled weight decay; one group per matrix shape."""

    def __init__(self, matrices: list[Tensor], lr: float, momentum=0.95, weight_decay=0.01):
        shapes = defaultdict(list)
        for matrix in matrices:
            shapes[matrix.shape].append(matrix)
        groups = [{"params": params} for params in shapes.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """Update all matrices of a shape at once."""
        for group in self.param_groups:
            params, momentum = group["params"], group["momentum"]
            gradients = torch.stack([param.grad for param in params])
            state = self.state[params[0]]
            if "average" not in state:
                state["average"] = torch.zeros_like(gradients)
            state["average"].lerp_(gradients, 1 - momentum)
            update = orthogonalize(gradients.lerp(state["average"], momentum))
            rows, columns = gradients.shape[-2:]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            scale = group["lr"] * max(1.0, rows / columns) ** 0.5
            torch._foreach_add_(params, update.unbind(), alpha=-scale)


def build_optimizers(
    model: nn.Module, muon_lr: float, adam_lr: float
) -> list[torch.optim.Optimizer]:
    """Give Muon the layers' matrices; embeddings, convolution, norms and biases go to AdamW."""
    matrices, others = [], []
    for name, param in model.named_parameters():
        is_matrix = param.ndim == 2 and "embed" not in name and "sight" not in name
        (matrices if is_matrix else others).append(param)
    fused = others[0].is_cuda
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    return [Muon(matrices, lr=muon_lr), adam]
