"""Adagrad, with an accumulator for each column or one for each vector."""

from __future__ import annotations

import numpy as np

from bagpipe.optim.base import Dims, Floats, RowOptimizer
from bagpipe.schedules import Schedule


class Adagrad(RowOptimizer):
    """s = s + g * g; w = w - a * (g / (sqrt(s) + eps)) with a = lr / (1 + (step - 1) * lr_decay).

    `torch.optim.Adagrad` on sparse gradients.
    """

    name = "adagrad"
    settings = ("lr_decay", "initial_accumulator_value", "eps")
    state_per_column = 1

    def __init__(
        self,
        lr: float | Schedule = 0.01,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(lr)
        self.lr_decay = self._number("lr_decay", lr_decay)
        self.initial_accumulator_value = self._number("initial_accumulator_value", initial_accumulator_value)
        self.eps = self._epsilon(eps)

    def _scalars(self, lr: float, step: int) -> tuple[float, ...]:
        return lr / (1.0 + (step - 1) * self.lr_decay), self.eps

    def _apply(self, rows: Floats, grads: Floats, dims: Dims, *scalars: np.float32) -> None:
        rate, eps = scalars
        dim = sum(dims)
        squares = rows[:, dim:]
        squares += grads * grads
        rows[:, :dim] -= rate * (grads / (np.sqrt(squares) + eps))


class RowwiseAdagrad(RowOptimizer):
    """Adagrad with one accumulator a vector instead of one a column, as FBGEMM's EXACT_ROWWISE_ADAGRAD.

    s = s + (g[0] * g[0] + g[1] * g[1] + ...) / dim, summed column after column from +0.0;
    w = w - (lr / (sqrt(s) + eps)) * g.
    """

    name = "rowwise_adagrad"
    settings = ("initial_accumulator_value", "eps")
    state_per_vector = 1

    def __init__(
        self, lr: float | Schedule = 0.01, *, initial_accumulator_value: float = 0.0, eps: float = 1e-8
    ) -> None:
        super().__init__(lr)
        self.initial_accumulator_value = self._number("initial_accumulator_value", initial_accumulator_value)
        self.eps = self._epsilon(eps)

    def _scalars(self, lr: float, step: int) -> tuple[float, ...]:  # noqa: ARG002
        return lr, self.eps

    def _apply(self, rows: Floats, grads: Floats, dims: Dims, *scalars: np.float32) -> None:
        lr, eps = scalars
        start = 0
        for dim, mean_square in zip(dims, rows[:, sum(dims) :].T, strict=True):
            grad = grads[:, start : start + dim]
            total = np.zeros(len(rows), np.float32)
            for column in grad.T:
                total += column * column
            mean_square += total / np.float32(dim)
            rows[:, start : start + dim] -= (lr / (np.sqrt(mean_square) + eps))[:, None] * grad
            start += dim
