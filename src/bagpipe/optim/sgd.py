"""Plain gradient descent, with and without momentum, and rows that do not move at all."""

from __future__ import annotations

import numpy as np

from bagpipe.optim.base import Dims, Floats, RowOptimizer
from bagpipe.schedules import Schedule


class SGD(RowOptimizer):
    """w = w - lr * g; `torch.optim.SGD` on sparse gradients."""

    name = "sgd"

    def _scalars(self, lr: float, step: int) -> tuple[float, ...]:  # noqa: ARG002
        return (lr,)

    def _apply(self, rows: Floats, grads: Floats, dims: Dims, *scalars: np.float32) -> None:  # noqa: ARG002
        (lr,) = scalars
        rows -= lr * grads


class Momentum(RowOptimizer):
    """v = momentum * v + g; w = w - lr * v, or with nesterov w = w - lr * (g + momentum * v).

    Lazy: the velocity of an untouched row neither moves the row nor fades.
    """

    name = "momentum"
    settings = ("momentum", "nesterov")
    state_per_column = 1

    def __init__(self, lr: float | Schedule, momentum: float = 0.9, *, nesterov: bool = False) -> None:
        super().__init__(lr)
        self.momentum = self._number("momentum", momentum, 0.0, 1.0)
        self.nesterov = bool(nesterov)

    def _scalars(self, lr: float, step: int) -> tuple[float, ...]:  # noqa: ARG002
        return lr, self.momentum

    def _apply(self, rows: Floats, grads: Floats, dims: Dims, *scalars: np.float32) -> None:
        lr, momentum = scalars
        dim = sum(dims)
        velocity = rows[:, dim:]
        velocity[:] = momentum * velocity + grads
        rows[:, :dim] -= lr * (grads + momentum * velocity if self.nesterov else velocity)


class Frozen(RowOptimizer):
    """Rows that never change, such as pretrained vectors."""

    name = "frozen"

    def __init__(self) -> None:
        super().__init__(0.0)

    def _scalars(self, lr: float, step: int) -> tuple[float, ...]:  # noqa: ARG002
        return ()

    def _apply(self, rows: Floats, grads: Floats, dims: Dims, *scalars: np.float32) -> None:
        pass
