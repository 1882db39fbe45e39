"""The loop that users write: batches whose rows are in the cache, one update of rows an iteration, and barriers.

It owns the pipeline from the first batch to `close`, which always runs: at the end of the data, on `break`, and on any
exception, so that every updated row is in the store afterwards and nothing is left running (I4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from bagpipe.adapt import Adapter
from bagpipe.cache import RowCache
from bagpipe.checker import Checker
from bagpipe.embedding import CachedLayer, Lookups, TableView, handle_base
from bagpipe.errors import GradientError, ModelError, ValueRangeError
from bagpipe.kernels.parallel import Workers
from bagpipe.layers import Binding, swap
from bagpipe.layout import RowLayout
from bagpipe.optim import PerTable, RowOptimizer
from bagpipe.oracle.lookahead import Oracle
from bagpipe.oracle.plan import Plan
from bagpipe.store import Store
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.source import Source
from bagpipe.trainer.stages import Driver
from bagpipe.trainer.update import RowUpdate
from bagpipe.types import Table

STATE_BYTES_MAX = 2 * 10**9
"""Rows up to this size fit a state_dict."""


class Batches:
    """The batches of an accelerated loader: their ids name cached rows, which are on the device already."""

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        binding: Binding,
        rows: RowOptimizer | PerTable,
        layouts: Sequence[RowLayout],
        oracle: Oracle,
        cache: RowCache,
        store: Store,
        workers: Workers,
        driver: Driver,
        depth: int,
        check: bool,
    ) -> None:
        self.model, self.binding, self.layouts, self.cache, self.store = model, binding, layouts, cache, store
        self._source, self._rows, self._oracle, self._workers = source, rows, oracle, workers
        self._lookups = Lookups(layouts, workers, self)
        self._update = RowUpdate(layouts, self._lookups, workers)
        self._checker = Checker([layout.table.name for layout in layouts], cache) if check else None
        self._pipeline: Pipeline[list[Any]] = Pipeline(self._plans(), cache, store, driver, depth, self._checker)
        self._plan: Plan | None = None
        self._micro: list[Any] = []
        self._stepped = self._started = self._closed = False
        for layer in binding.layers:
            swap(model, layer.name, CachedLayer(layer, self._lookups))
        rows.attach(self.step)

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise  # otherwise the loop's own error says more than what it led to

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._next()) is not None:
            yield batch
        self.close()

    def close(self) -> None:
        """Write every updated row back and stop the background work; the model then looks rows up in the store."""
        if self._closed:
            return
        self._finish_iteration()
        self._closed = True
        self._lookups.view, self._lookups.training, self._lookups.recording = None, False, False
        self._rows.detach()
        try:
            if self._started:
                self._pipeline.close()
                if self._checker is not None:
                    self._checker.finished()
        finally:
            self._workers.close()

    def evaluate(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Batches of another loader, to be given to the model without training: a barrier that changes nothing."""
        self.barrier()
        before = self._lookups.view, self._lookups.recording
        adapter: Adapter | None = None
        try:
            for number, batch in enumerate(loader):
                adapter = adapter or Adapter(batch)
                ids = adapter.extract(batch, self._source.features, number)
                self._lookups.view, handles = self._private_view(ids)
                self._lookups.recording = False
                yield adapter.replace(batch, handles)
        finally:
            self._lookups.view, self._lookups.recording = before

    def stats(self) -> dict[str, Any]:
        """What has moved so far, and how long training waited for it."""
        traffic = self._pipeline.traffic
        return {
            "iterations": traffic.iterations,
            "hit_rate": traffic.hit_rows / traffic.unique_rows if traffic.unique_rows else math.nan,
            "fetched_rows": traffic.fetched_rows,
            "written_rows": traffic.written_rows,
            "stall_seconds": traffic.stall_s,
            "lookahead": traffic.lookahead,
            "cache_rows": sum(self.cache.capacity),
            "cache_bytes": self.cache.num_bytes,
        }

    def step(self, scaler: Any = None) -> bool:
        """Update the rows of this iteration; `rows.step()` calls it. False: skipped, a gradient was not finite."""
        plan, views = self._in_iteration("step")
        if self._micro:
            raise ModelError(
                f"step() with {len(self._micro)} batches of this iteration still to come: call it after them"
            )
        if self._stepped:
            raise ModelError(f"step() twice in iteration {plan.iteration}: call it once, after the backward pass")
        if not self._update.any_gradient():
            return False
        try:
            self._update.collect(views, plan.iteration)
        except GradientError:
            if scaler is None:
                raise
            return False
        if scaler is not None:
            self._update.scale(1.0 / scaler.get_scale())
        steps = {id(layout.optimizer): layout.optimizer for layout in self.layouts}
        scalars = {key: optimizer.scalars(optimizer.updates + 1) for key, optimizer in steps.items()}
        self._update.apply(views, [scalars[id(layout.optimizer)] for layout in self.layouts])
        for optimizer in steps.values():
            optimizer.advance()
        for table in self._update.tables:
            self.cache.mark_updated(table, views[table].slots)
        if self._checker is not None:
            self._checker.updated(plan, self._update.tables)
        self._stepped = True
        return True

    def grad_norm(self) -> float:
        """Euclidean norm of the row gradients of this iteration."""
        plan, views = self._in_iteration("grad_norm")
        self._update.collect(views, plan.iteration)
        return math.sqrt(self._update.squared_norm())

    def scale_gradients(self, factor: float) -> None:
        """Multiply the row gradients of this iteration, for clipping."""
        plan, views = self._in_iteration("scale_gradients")
        self._update.collect(views, plan.iteration)
        self._update.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Everything that training has changed besides the dense part: rows with their state, and the counters."""
        self.barrier()
        num_bytes = sum(self.store.num_rows(number) * layout.width * 4 for number, layout in enumerate(self.layouts))
        if num_bytes > STATE_BYTES_MAX:
            raise ModelError(
                f"the touched rows take {num_bytes / 1e9:.1f} GB, too many for a state_dict (at most "
                f"{STATE_BYTES_MAX / 1e9:.0f} GB): keep the store's files with store='a/directory', or "
                "write the weights with bagpipe.export(model, path)"
            )
        tables = {}
        for number, layout in enumerate(self.layouts):
            ids = self.store.ids(number)
            tables[layout.table.name] = {
                "ids": torch.from_numpy(ids.copy()),
                "rows": torch.from_numpy(self.read_rows(number, ids)),
            }
        return {"tables": tables, "optimizer": self._rows.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; before the first batch only."""
        names = {layout.table.name: number for number, layout in enumerate(self.layouts)}
        if set(state["tables"]) != set(names):
            raise ModelError(f"the saved state has tables {sorted(state['tables'])}, the model {sorted(names)}")
        for name, part in state["tables"].items():
            width = self.layouts[names[name]].width
            if part["rows"].shape != (len(part["ids"]), width):
                raise ModelError(
                    f"rows of table {name!r} have shape {tuple(part['rows'].shape)} in the saved state, here they have "
                    f"{width} floats: build the model and row optimizer that were saved"
                )
        self._rows.load_state_dict(state["optimizer"])
        for name, part in state["tables"].items():
            self.write_rows(names[name], part["ids"].numpy(), part["rows"].numpy())

    def barrier(self) -> None:
        """Return when the store has every update so far."""
        if self._started and not self._closed:
            self._pipeline.flush()

    def read_rows(self, table: int, ids: Any) -> Any:
        """Rows as the store has them: vectors and optimizer state."""
        values = np.empty((len(ids), self.layouts[table].width), np.float32)
        self.store.read(table, ids, values)
        return values

    def write_rows(self, table: int, ids: Any, values: Any) -> None:
        """Set rows in the store; refused while rows are cached."""
        if self._started and not self._closed:
            raise ModelError("rows can't be set while training goes on: do it before the first batch")
        self.store.write(table, ids, values)

    def _next(self) -> Any | None:
        """The next batch, or None at the end."""
        if self._closed:
            raise ModelError("these batches have been read to their end: call bagpipe.accelerate again")
        if not self._micro:
            self._finish_iteration()
            if not self._started:
                self._started = self._lookups.training = True
                self._pipeline.start()
            item = self._pipeline.next()
            if item is None:
                return None
            self._begin_iteration(*item)
        return self._micro.pop(0)

    def _begin_iteration(self, plan: Plan, batches: list[Any]) -> None:
        self._plan, self._micro, self._stepped = plan, batches, False
        if self._checker is not None:
            self._checker.training(plan)
        views = []
        for table in range(len(self.layouts)):
            ids, slots = plan.rows.of_table(table)
            rows = self.cache.data[self.cache.group[table]].numpy()
            views.append(TableView(rows, slots, ids, handle_base(table, plan.iteration)))
        self._lookups.view, self._lookups.recording = views, True
        self._update.discard()

    def _finish_iteration(self) -> None:
        if self._plan is not None:
            plan, self._plan = self._plan, None
            self._micro = []
            self._update.discard()
            self._pipeline.updated(plan)

    def _in_iteration(self, what: str) -> tuple[Plan, Sequence[TableView]]:
        if self._plan is None or self._lookups.view is None:
            raise ModelError(f"{what}() outside of the training loop: call it on a batch, after loss.backward()")
        return self._plan, self._lookups.view

    def _plans(self) -> Iterator[tuple[Plan, list[Any]]]:
        for plan, group in self._oracle.plans(self._source.groups()):
            yield plan, self._source.rewrite(plan, group, self.binding.tables)
        if self._source.error is not None:
            raise self._source.error

    def _private_view(self, ids: Mapping[str, Any]) -> tuple[list[TableView], dict[str, torch.Tensor]]:
        """The rows of one batch in a buffer of their own, and the handles of its ids there."""
        views, handles = [], {}
        for number, table in enumerate(self.binding.tables):
            parts = [ids[name] for name in table.features]
            _check_range(table, parts)
            unique, inverse = np.unique(np.concatenate(parts), return_inverse=True)
            slots = np.arange(len(unique), dtype=np.int32)
            views.append(TableView(self.read_rows(number, unique), slots, unique, handle_base(number, 0)))
            edges = np.cumsum([len(part) for part in parts])[:-1]
            for name, of_feature in zip(table.features, np.split(inverse.reshape(-1), edges), strict=True):
                handles[name] = torch.from_numpy(of_feature.astype(np.int64) + handle_base(number, 0))
        return views, handles


def _check_range(table: Table, parts: Sequence[Any]) -> None:
    if table.rows is None:
        return
    for name, part in zip(table.features, parts, strict=True):
        bad = part[(part < 0) | (part >= table.rows)]
        if len(bad):
            raise ValueRangeError(
                f"feature {name!r} has id {bad[0]}, out of range for table {table.name!r} ({table.rows} rows): "
                "check the data, or give the table more rows"
            )
