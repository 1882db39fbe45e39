"""Clipping by the norm of all gradients together: those of dense parameters and those of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from bagpipe.errors import ConfigError, GradientError
from bagpipe.optim import PerTable, RowOptimizer
from bagpipe.row_parameter import RowParameter
from bagpipe.trainer.batches import Batches
from bagpipe.trainer.sessions import session_of

EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds to the norm."""


class Looping(Protocol):
    """What `bagpipe.prepare` makes of a loader."""

    @property
    def loop(self) -> Batches:
        """The iteration under way, or the last one."""


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    rows: RowOptimizer | PerTable | Batches | Looping,
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their Euclidean norm is at most `max_norm`; returns the norm as it was.

    What `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` does for a model whose embedding weights are
    parameters: `parameters` are the dense ones, `rows` the row optimizer that was given to `bagpipe.accelerate`. Call
    it between `loss.backward()` and the steps of both optimizers.
    """
    if not max_norm >= 0:
        raise ConfigError(f"max_norm is {max_norm!r}: give a number of at least 0")
    if isinstance(rows, RowOptimizer | PerTable):
        batches = session_of(rows)
    else:
        batches = rows if isinstance(rows, Batches) else rows.loop
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    dense = [parameter.grad for parameter in given if not isinstance(parameter, RowParameter)]
    grads = [grad for grad in dense if grad is not None]
    squares = sum(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2 for grad in grads)
    norm = math.sqrt(squares + batches.grad_norm() ** 2)
    if error_if_nonfinite and not math.isfinite(norm):
        raise GradientError(f"the norm of all gradients is {norm}: lower the learning rate, or skip this batch")
    factor = max_norm / (norm + EPSILON)
    if not factor >= 1.0:  # not finite: gradients become so too, and the steps can tell
        for grad in grads:
            grad.mul_(factor)
        batches.scale_gradients(factor)
    return torch.tensor(norm)
