"""One update of the rows of a batch: gradients are added up row by row, checked, and applied in their slots.

Two passes over the tables, each split over the worker threads by table: nothing is updated before every gradient is
known to be finite. The order of additions is that of the forward pass, whatever the number of threads (I1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bagpipe.embedding import Lookups, TableView
from bagpipe.errors import GradientError
from bagpipe.kernels.bag import accumulate
from bagpipe.kernels.parallel import Workers
from bagpipe.kernels.update import apply, first_not_finite, scale
from bagpipe.layout import RowLayout
from bagpipe.optim import Frozen, Scalars

Floats = npt.NDArray[np.float32]


class RowUpdate:
    """Gradients of the rows of the current batch, and their application."""

    def __init__(self, layouts: Sequence[RowLayout], lookups: Lookups, workers: Workers) -> None:
        self._layouts, self._lookups, self._workers = layouts, lookups, workers
        self._scratch = [np.empty((0, layout.dim), np.float32) for layout in layouts]
        self._gradients: list[Floats] | None = None
        self.tables = [number for number, layout in enumerate(layouts) if not isinstance(layout.optimizer, Frozen)]
        """The tables that are updated at all."""

    def discard(self) -> None:
        """Forget the gradients: another batch begins."""
        self._gradients = None
        self._lookups.forget()

    def any_gradient(self) -> bool:
        """Whether a backward pass has reached a look-up of this batch."""
        return any(call.output.grad is not None for calls in self._lookups.calls for call in calls)

    def collect(self, views: Sequence[TableView], iteration: int) -> list[Floats]:
        """The gradient of each row of each table, computed once a batch; GradientError if one is not finite."""
        if self._gradients is None:
            self._gradients = [self._room(table, len(view.slots)) for table, view in enumerate(views)]
            order = sorted(self.tables, key=lambda table: -sum(len(c.bags) for c in self._lookups.calls[table]))
            bad = dict.fromkeys(order, -1)

            def add(table: int) -> None:
                bad[table] = self._add_up(table)

            self._workers.run([lambda table=table: add(table) for table in order])  # type: ignore[misc]
            for table, row in bad.items():
                if row >= 0:
                    self._gradients = None
                    raise GradientError(
                        f"iteration {iteration}: the gradient of row {views[table].ids[row]} of table "
                        f"{self._layouts[table].table.name!r} is not finite; no row was updated: "
                        "lower the learning rate, clip gradients, or pass scaler= to step() to skip such batches"
                    )
        return self._gradients

    def squared_norm(self) -> float:
        """Sum of squares of all gradients, in float64, table after table."""
        assert self._gradients is not None
        return float(sum(np.square(grads, dtype=np.float64).sum() for grads in self._gradients))

    def scale(self, factor: float) -> None:
        """Multiply all gradients, for clipping."""
        assert self._gradients is not None
        for grads in self._gradients:
            scale(grads, np.float32(factor))

    def apply(self, views: Sequence[TableView], scalars: Sequence[Scalars]) -> None:
        """Update the rows in their slots."""
        gradients = self._gradients
        assert gradients is not None

        def update(table: int) -> None:
            layout, view = self._layouts[table], views[table]
            apply(layout.optimizer, view.rows, view.slots, gradients[table], layout.dims, scalars[table])

        order = sorted(self.tables, key=lambda table: -len(views[table].slots))
        self._workers.run([lambda table=table: update(table) for table in order])  # type: ignore[misc]
        self.discard()

    def _room(self, table: int, num_rows: int) -> Floats:
        """A buffer that is kept from batch to batch: fresh memory would be paged in every time."""
        if len(self._scratch[table]) < num_rows:
            self._scratch[table] = np.empty((num_rows * 5 // 4, self._layouts[table].dim), np.float32)
        return self._scratch[table][:num_rows]

    def _add_up(self, table: int) -> int:
        assert self._gradients is not None
        grads = self._gradients[table]
        grads.fill(0)
        for call in self._lookups.calls[table]:
            if call.output.grad is not None:
                bad = accumulate(call.output.grad.numpy(), call.bags, grads, call.column)
                assert bad < 0, "the forward pass has checked every handle"
        return first_not_finite(grads)
