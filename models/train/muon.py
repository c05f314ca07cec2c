"""Muon for matrices: momentum, then an orthogonalised update, for all matrices of one shape at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz towards the nearest orthogonal matrix, batched over the first dimension; bf16 where it is fast."""
    a, b, c = COEFFICIENTS
    x = update.to(torch.bfloat16 if update.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon:
    """Stacks same-shaped matrices (of all layers and experts) so that one step is a few large products."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        self.lr, self.weight_decay = lr, weight_decay
        self.groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            self.groups[(parameter.shape[-2], parameter.shape[-1])].append(parameter)
        self.momenta: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def step(self, factor: float, momentum: float) -> None:
        """One update at `lr * factor`; gradients are cleared."""
        for shape, parameters in self.groups.items():
            gradient = torch.cat([p.grad.reshape(-1, *shape) for p in parameters if p.grad is not None])
            buffer = self.momenta.setdefault(shape, torch.zeros_like(gradient))
            buffer.lerp_(gradient, 1 - momentum)
            nesterov = gradient.lerp(buffer, momentum)
            update = orthogonalize(nesterov).float() * (0.2 * max(shape) ** 0.5)
            pieces = torch.split(update, [p.numel() // (shape[0] * shape[1]) for p in parameters])
            lr = self.lr * factor
            views = [piece.reshape(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
            torch._foreach_mul_(parameters, 1 - lr * self.weight_decay)
            torch._foreach_add_(parameters, views, alpha=-lr)
            for p in parameters:
                p.grad = None


def momentum_at(step: int) -> float:
    """0.85 rising to 0.95 over the first 300 steps."""
    return 0.85 + 0.10 * min(1.0, step / 300)
