"""Muon: move a weight matrix along its orthogonalised momentum. Used by `train.py` only.

Chapter 00. A gradient matrix is nearly of low rank, so plain momentum moves a few directions and neglects the rest.
Muon replaces the momentum U S V^T by about U V^T: same directions, all of the same size (Jordan et al. 2024; at
scale, Liu et al. 2025, arXiv:2502.16982). torch.optim.Muon computes this in bfloat16, which is
ten times slower than float32 on a CPU without bfloat16 instructions; this version also takes all matrices of one
shape at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a quintic that drives singular values towards 1, fast and roughly


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """[n, rows, columns] -> the same shape, every singular value near 1 (0.7 to 1.2), by Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # largest singular value <= 1
    for _ in range(steps):
        square = x @ x.mT  # [n, rows, rows]
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """params: 2-D matrices. An update has root mean square 0.2 lr, about AdamW's, so the same lr fits both."""

    def __init__(self, params, lr: float = 0.01, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                update = orthogonalize(torch.stack([self._momentum(p, group["momentum"]) for p in params]))
                size = 0.2 * max(shape) ** 0.5  # makes the root mean square of the update 0.2 whatever the shape
                for p, u in zip(params, update):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(u, alpha=-group["lr"] * size)

    def _momentum(self, p: Tensor, beta: float) -> Tensor:
        """Nesterov: the running mean of gradients, looked at one step ahead."""
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(p.grad, 1 - beta)
        return p.grad.lerp(state["momentum"], beta)
