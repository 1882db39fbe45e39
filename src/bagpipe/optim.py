"""The optimizers of embedding rows (`bagpipe.optim`): what one update does to a row, defined in NumPy float32.

A row is [vectors | state], one float32 array; `dims` are the lengths of its vectors. Kernels must equal `update` bit
for bit (I1): operations in the order written, none fused, scalars computed in float64 and rounded once. Every update is
lazy: a row that a batch does not touch keeps its vectors and its state, to the bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any, ClassVar

import numpy as np

from bagpipe import schedules
from bagpipe.arrays import Floats, Int32s
from bagpipe.errors import ConfigError
from bagpipe.kernels import update as kernels
from bagpipe.schedules import Schedule, check_number

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Frozen",
    "Momentum",
    "PerTable",
    "RowOptimizer",
    "RowwiseAdagrad",
    "Scalars",
    "build",
]

Scalars = tuple[np.float32, ...]
Dims = tuple[int, ...]

_BELOW_ONE = math.nextafter(1.0, 0.0)


class RowOptimizer(ABC):
    """Base of the row optimizers; the learning rate may be changed between steps.

    A new one defines the class variables below, `_scalars` and `_apply`; without a kernel of its own it runs in NumPy.
    """

    name: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ()
    """Names of the hyperparameters beside `lr`, each an attribute."""
    state_per_column: ClassVar[int] = 0
    state_per_vector: ClassVar[int] = 0
    rests_at_zero: ClassVar[bool] = False
    """Whether a zero gradient changes neither a row nor its state, so that it may be applied where there was none."""
    initial_accumulator_value: float = 0.0
    """What every float of a row's state starts as."""

    def __init__(self, lr: float | Schedule) -> None:
        self.lr = lr
        self._updates = 0

    @property
    def updates(self) -> int:
        """How many updates have been applied."""
        return self._updates

    def advance(self) -> None:
        """Count an update that was applied."""
        self._updates += 1

    def resume(self, updates: int) -> None:
        """Go on after so many updates."""
        self._updates = updates

    def for_table(self, table: str, layers: Sequence[str] = ()) -> RowOptimizer:  # noqa: ARG002
        """The optimizer of a table: this one, whatever the table."""
        return self

    @property
    def lr(self) -> float | Schedule:
        """The learning rate: a number, or a callable that takes the 0-based iteration."""
        return self._lr

    @lr.setter
    def lr(self, lr: float | Schedule) -> None:
        self._lr = lr if callable(lr) else self._number("lr", lr)

    def state_width(self, dims: Dims) -> int:
        """How many floats of state follow the vectors in a row."""
        return self.state_per_column * sum(dims) + self.state_per_vector * len(dims)

    def initial_state(self, dims: Dims) -> Floats:
        """The state of a row that was never updated."""
        return np.full(self.state_width(dims), self.initial_accumulator_value, np.float32)

    def scalars(self, step: int) -> Scalars:
        """The numbers that update `step` (counted from 1) uses for all rows, at the present learning rate.

        A gradient that is applied later takes the scalars of its own step along.
        """
        lr = self.lr
        if callable(lr):
            lr = self._number(f"lr at iteration {step - 1}", lr(step - 1))
        return tuple(np.float32(value) for value in self._scalars(lr, step))

    def update(self, rows: Floats, grads: Floats, dims: Dims, step: int) -> None:
        """Update rows (n, width) in place with one gradient (n, sum(dims)) each; `step` counts updates from 1."""
        self.apply(rows, grads, dims, self.scalars(step))

    def apply(self, rows: Floats, grads: Floats, dims: Dims, scalars: Scalars) -> None:
        """`update` with scalars computed earlier."""
        self._check(rows, grads, dims, len(rows))
        with np.errstate(all="ignore"):
            self._apply(rows, grads, dims, *scalars)

    def apply_in_cache(self, cache: Floats, slots: Int32s, grads: Floats, dims: Dims, scalars: Scalars) -> None:
        """`apply` to the rows in these slots, which differ from each other. Cost: one pass over them, bound by memory.

        An optimizer without a kernel, such as a user's own, runs its NumPy definition.
        """
        self._check(cache, grads, dims, len(slots))
        run = _KERNELS.get(type(self))  # by the very type: a subclass may define another update
        if run is not None:
            kernels.check(cache, grads)
            run(cache, slots, grads, np.array(dims), scalars)
        elif type(self) is not Frozen:
            rows = cache[slots]
            self.apply(rows, grads, dims, scalars)
            cache[slots] = rows

    def _check(self, rows: Floats, grads: Floats, dims: Dims, num_rows: int) -> None:
        assert rows.dtype == grads.dtype == np.float32, (rows.dtype, grads.dtype)
        assert grads.shape == (num_rows, sum(dims)), (grads.shape, num_rows, dims)
        assert rows.shape[1] == sum(dims) + self.state_width(dims), (rows.shape, dims)

    @abstractmethod
    def _scalars(self, lr: float, step: int) -> tuple[float, ...]:
        """The scalars of an update in float64."""

    @abstractmethod
    def _apply(self, rows: Floats, grads: Floats, dims: Dims, *scalars: np.float32) -> None:
        """The definition of one update, in place."""

    def state_dict(self) -> dict[str, Any]:
        """The counters of this optimizer; the state of rows travels with the rows."""
        return {"name": self.name, "updates": self._updates, "lr": None if callable(self.lr) else self.lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; a schedule stays as it was built."""
        if state.get("name") != self.name:
            raise ConfigError(
                f"the saved state is of row optimizer {state.get('name')!r}, this is {self.name!r}: "
                "build the optimizer that was saved"
            )
        updates = state.get("updates")
        if not isinstance(updates, int) or isinstance(updates, bool) or updates < 0:
            raise ConfigError(f"updates is {updates!r} in the saved state: it must be a whole number of at least 0")
        if state.get("lr") is not None and not callable(self.lr):
            self.lr = state["lr"]
        self._updates = updates

    def describe(self) -> dict[str, Any]:
        """Name and hyperparameters as plain data, for run summaries."""
        settings = {key: getattr(self, key) for key in self.settings}
        return {"name": self.name, "lr": schedules.describe(self.lr)} | settings

    def __repr__(self) -> str:
        settings = {key: value for key, value in self.describe().items() if key != "name"}
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"

    def _number(self, name: str, value: object, low: float = 0.0, high: float = schedules.FLOAT32_MAX) -> float:
        return check_number(type(self).__name__, name, value, low, high)

    def _epsilon(self, value: object) -> float:
        # Zero would turn a row without state and with a zero gradient into 0 / 0; the check is on what float32 keeps.
        if np.float32(number := self._number("eps", value)) > 0:
            return number
        raise ConfigError(f"{type(self).__name__}: eps is {value!r}: give a number above 0 (at least 1.4e-45)")


class SGD(RowOptimizer):
    """w = w - lr * g; `torch.optim.SGD` on sparse gradients."""

    name = "sgd"
    rests_at_zero = True

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
        return lr, self.momentum, self.nesterov

    def _apply(self, rows: Floats, grads: Floats, dims: Dims, *scalars: np.float32) -> None:
        lr, momentum, nesterov = scalars
        dim = sum(dims)
        velocity = rows[:, dim:]
        velocity[:] = momentum * velocity + grads
        rows[:, :dim] -= lr * (grads + momentum * velocity if nesterov else velocity)


class Adagrad(RowOptimizer):
    """s = s + g * g; w = w - a * (g / (sqrt(s) + eps)) with a = lr / (1 + (step - 1) * lr_decay).

    `torch.optim.Adagrad` on sparse gradients.
    """

    name = "adagrad"
    rests_at_zero = True
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
    rests_at_zero = True
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
        first, second = (self._number(f"betas[{i}]", beta, 0.0, _BELOW_ONE) for i, beta in enumerate(betas))
        self.betas = (first, second)
        self.eps = self._epsilon(eps)

    def _scalars(self, lr: float, step: int) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        rate = lr * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
        return rate, 1.0 - beta1, 1.0 - beta2, self.eps

    def _apply(self, rows: Floats, grads: Floats, dims: Dims, *scalars: np.float32) -> None:
        rate, toward_grad, toward_square, eps, *decoupled = scalars
        dim = sum(dims)
        vectors, mean, square = rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim :]
        mean += (grads - mean) * toward_grad
        square += (grads * grads - square) * toward_square
        root = np.sqrt(square)
        if decoupled:
            keep, correction = decoupled
            vectors *= keep
            root /= correction
        vectors -= rate * (mean / (root + eps))


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


class Frozen(RowOptimizer):
    """Rows that never change, such as pretrained vectors."""

    name = "frozen"
    rests_at_zero = True

    def __init__(self) -> None:
        super().__init__(0.0)

    def _scalars(self, lr: float, step: int) -> tuple[float, ...]:  # noqa: ARG002
        return ()

    def _apply(self, rows: Floats, grads: Floats, dims: Dims, *scalars: np.float32) -> None:
        pass


_KERNELS: dict[type[RowOptimizer], Callable[..., None]] = {
    SGD: kernels.sgd,
    Momentum: kernels.momentum,
    Adagrad: kernels.adagrad,
    RowwiseAdagrad: kernels.rowwise_adagrad,
    Adam: kernels.adam,
    AdamW: kernels.adam,
}


class PerTable:
    """One optimizer for most tables and others for those that are named.

    A name is that of a table or of a layer that looks rows up in it.
    """

    def __init__(self, default: RowOptimizer, tables: Mapping[str, RowOptimizer]) -> None:
        self.default, self.tables = default, dict(tables)

    def for_table(self, table: str, layers: Sequence[str] = ()) -> RowOptimizer:
        """The optimizer of a table, found by its name or by that of one of its layers."""
        found = {name: self.tables[name] for name in (table, *layers) if name in self.tables}
        if len({id(optimizer) for optimizer in found.values()}) > 1:
            raise ConfigError(
                f"row optimizers are given for {', '.join(map(repr, found))}, which share the rows of table {table!r}: "
                "give one of them, or the same optimizer for all"
            )
        return next(iter(found.values()), self.default)

    def state_dict(self) -> dict[str, Any]:
        """The counters of the optimizers; the state of rows travels with the rows."""
        return self._of_all(methodcaller("state_dict"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        saved = state.get("tables")
        if state.get("name") != "per_table" or not isinstance(saved, Mapping) or set(saved) != set(self.tables):
            raise ConfigError(
                f"the saved state is of row optimizer {state.get('name')!r} with tables {sorted(saved or ())}, this is "
                f"'per_table' with tables {sorted(self.tables)}: build the optimizer that was saved"
            )
        self.default.load_state_dict(state["default"])
        for name, optimizer in self.tables.items():
            optimizer.load_state_dict(saved[name])

    def describe(self) -> dict[str, Any]:
        """Names and hyperparameters as plain data, for run summaries."""
        return self._of_all(methodcaller("describe"))

    def _of_all(self, what: Callable[[RowOptimizer], dict[str, Any]]) -> dict[str, Any]:
        tables = {name: what(optimizer) for name, optimizer in self.tables.items()}
        return {"name": "per_table", "default": what(self.default), "tables": tables}

    def __repr__(self) -> str:
        return f"PerTable({self.default!r}, {self.tables!r})"


NAMES: dict[str, type[RowOptimizer]] = {
    kind.name: kind for kind in (SGD, Momentum, Adagrad, RowwiseAdagrad, Adam, AdamW)
}
"""The names that configuration files use."""


def build(name: str, **hyperparameters: Any) -> RowOptimizer:
    """The row optimizer of this name; `lr` may be a mapping of a schedule's name and settings."""
    if name not in NAMES:
        raise ConfigError(f"there is no row optimizer {name!r}: choose one of {', '.join(NAMES)}")
    kind = NAMES[name]
    schedules.check_settings(f"row optimizer {name!r}", hyperparameters, ["lr", *kind.settings])
    if "lr" in hyperparameters:
        hyperparameters["lr"] = schedules.from_config(hyperparameters["lr"])
    elif kind in (SGD, Momentum):
        raise ConfigError(f"row optimizer {name!r} has no lr: give one")
    return kind(**hyperparameters)
