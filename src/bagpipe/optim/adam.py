"""Lazy Adam and AdamW."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from bagpipe.errors import ConfigError
from bagpipe.optim.base import Dims, Floats, RowOptimizer
from bagpipe.schedules import Schedule

BELOW_ONE = math.nextafter(1.0, 0.0)


class Adam(RowOptimizer):
    """Lazy Adam, as `torch.optim.SparseAdam`: only touched rows move, the bias correction counts all updates.

    m = m + (g - m) * (1 - beta1); v = v + (g * g - v) * (1 - beta2); w = w - a * (m / (sqrt(v) + eps))
    with a = lr * sqrt(1 - beta2 ** step) / (1 - beta1 ** step).
    """

    name = "adam"
    settings: ClassVar[tuple[str, ...]] = ("betas", "eps")
    state_per_column = 2

    def __init__(
        self, lr: float | Schedule = 0.001, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(lr)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ConfigError(f"{type(self).__name__}: betas is {betas!r}: give two numbers of at least 0 and below 1")
        first, second = (self._number(f"betas[{i}]", beta, 0.0, BELOW_ONE) for i, beta in enumerate(betas))
        self.betas = (first, second)
        self.eps = self._epsilon(eps)

    def _scalars(self, lr: float, step: int) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        rate = lr * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
        return rate, 1.0 - beta1, 1.0 - beta2, self.eps

    def _apply(self, rows: Floats, grads: Floats, dims: Dims, *scalars: np.float32) -> None:
        rate, toward_grad, toward_square, eps = scalars
        dim = sum(dims)
        mean, square = rows[:, dim : 2 * dim], rows[:, 2 * dim :]
        mean += (grads - mean) * toward_grad
        square += (grads * grads - square) * toward_square
        rows[:, :dim] -= rate * (mean / (np.sqrt(square) + eps))


class AdamW(Adam):
    """Lazy Adam with decoupled weight decay; where every row is touched at every step, `torch.optim.AdamW`.

    Of touched rows only, in this order:
    w = w * (1 - lr * weight_decay); m = m + (g - m) * (1 - beta1); v = v + (g * g - v) * (1 - beta2);
    w = w - (lr / (1 - beta1 ** step)) * (m / (sqrt(v) / sqrt(1 - beta2 ** step) + eps)).
    """

    name = "adamw"
    settings = ("betas", "eps", "weight_decay")

    def __init__(
        self,
        lr: float | Schedule = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(lr, betas=betas, eps=eps)
        self.weight_decay = self._number("weight_decay", weight_decay)

    def _scalars(self, lr: float, step: int) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        keep, correction = 1.0 - lr * self.weight_decay, math.sqrt(1.0 - beta2**step)
        return lr / (1.0 - beta1**step), 1.0 - beta1, 1.0 - beta2, self.eps, keep, correction

    def _apply(self, rows: Floats, grads: Floats, dims: Dims, *scalars: np.float32) -> None:
        rate, toward_grad, toward_square, eps, keep, correction = scalars
        dim = sum(dims)
        mean, square = rows[:, dim : 2 * dim], rows[:, 2 * dim :]
        rows[:, :dim] *= keep
        mean += (grads - mean) * toward_grad
        square += (grads * grads - square) * toward_square
        rows[:, :dim] -= rate * (mean / (np.sqrt(square) / correction + eps))
