"""What every row optimizer has: a learning rate, state that travels with the row, scalars of a step, and counters.

A row is [vectors | state], one float32 array; `dims` are the lengths of its vectors. Kernels must equal `update` bit
for bit (I1): operations in the order written, none fused, scalars computed in float64 and rounded once. Every update is
lazy: a row that a batch does not touch keeps its vectors and its state, to the bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bagpipe import schedules
from bagpipe.errors import ConfigError, ModelError
from bagpipe.schedules import Schedule, check_number

Floats = npt.NDArray[np.float32]
Scalars = tuple[np.float32, ...]
Dims = tuple[int, ...]
Stepper = Callable[..., bool]
"""Updates the rows of a model and calls `advance` of each optimizer that it applied; False if it skipped the update."""


class Stepped:
    """What users call `step()` on; whoever trains a model's rows attaches what is then done."""

    def __init__(self) -> None:
        self._stepper: Stepper | None = None

    def attach(self, stepper: Stepper) -> None:
        """Let `step` drive the rows of a model."""
        if self._stepper is not None:
            raise ModelError(
                f"this {type(self).__name__} already drives the rows of a model: make one row optimizer for each "
                "bagpipe.accelerate, or leave the earlier one first"
            )
        self._stepper = stepper

    def detach(self) -> None:
        """Let go of the model."""
        self._stepper = None

    def step(self, **options: Any) -> bool:
        """Apply the gradients that backward passes collected to the rows they touched; False if that was skipped."""
        if self._stepper is None:
            raise ModelError(
                f"this {type(self).__name__} has no rows to update: pass it to bagpipe.accelerate, and call step() "
                "inside its 'with' block"
            )
        return self._stepper(**options)


class RowOptimizer(Stepped, ABC):
    """Base of the row optimizers; the learning rate may be changed between steps.

    A new one defines the class variables below, `_scalars` and `_apply`; without a kernel of its own it runs in NumPy.
    """

    name: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ()
    """Names of the hyperparameters beside `lr`, each an attribute."""
    state_per_column: ClassVar[int] = 0
    state_per_vector: ClassVar[int] = 0
    initial_accumulator_value: float = 0.0
    """What every float of a row's state starts as."""

    def __init__(self, lr: float | Schedule) -> None:
        super().__init__()
        self.lr = lr
        self._updates = 0

    @property
    def updates(self) -> int:
        """How many updates have been applied."""
        return self._updates

    def advance(self) -> None:
        """Count an update that was applied."""
        self._updates += 1

    def for_table(self, table: str, layers: Sequence[str] = ()) -> RowOptimizer:  # noqa: ARG002
        """The optimizer of a table: this one, whatever the table."""
        return self

    @property
    def lr(self) -> float | Schedule:
        """The learning rate: a number, or a callable that takes the 0-based iteration."""
        return self._lr

    @lr.setter
    def lr(self, lr: float | Schedule) -> None:
        self._lr = lr if callable(lr) else check_number(type(self).__name__, "lr", lr)

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
            lr = check_number(type(self).__name__, f"lr at iteration {step - 1}", lr(step - 1))
        return tuple(np.float32(value) for value in self._scalars(lr, step))

    def update(self, rows: Floats, grads: Floats, dims: Dims, step: int) -> None:
        """Update rows (n, width) in place with one gradient (n, sum(dims)) each; `step` counts updates from 1."""
        self.apply(rows, grads, dims, self.scalars(step))

    def apply(self, rows: Floats, grads: Floats, dims: Dims, scalars: Scalars) -> None:
        """`update` with scalars computed earlier."""
        assert rows.dtype == grads.dtype == np.float32, (rows.dtype, grads.dtype)
        assert grads.shape == (len(rows), sum(dims)), (grads.shape, rows.shape, dims)
        assert rows.shape[1] == sum(dims) + self.state_width(dims), (rows.shape, dims)
        with np.errstate(all="ignore"):
            self._apply(rows, grads, dims, *scalars)

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
        return {"name": self.name, "lr": schedules.describe(self.lr)} | {
            key: getattr(self, key) for key in self.settings
        }

    def __repr__(self) -> str:
        settings = {key: value for key, value in self.describe().items() if key != "name"}
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"

    def _number(self, name: str, value: object, low: float = 0.0, high: float = schedules.FLOAT32_MAX) -> float:
        return check_number(type(self).__name__, name, value, low, high)

    def _epsilon(self, value: object) -> float:
        # Zero would turn a row without state and with a zero gradient into 0 / 0; the check is on what float32 keeps.
        if np.float32(self._number("eps", value)) > 0:
            return self._number("eps", value)
        raise ConfigError(f"{type(self).__name__}: eps is {value!r}: give a number above 0 (at least 1.4e-45)")
