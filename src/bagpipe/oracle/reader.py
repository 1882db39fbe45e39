"""From the ids of a batch to its unique rows, entered into the shards' windows and linked to their previous uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int64s
from bagpipe.errors import BatchError, ValueRangeError
from bagpipe.kernels import oracle as kernels
from bagpipe.kernels.oracle import Batch
from bagpipe.kernels.parallel import Workers
from bagpipe.kernels.window_map import ANY_ID, address_of
from bagpipe.oracle.shard import Shard
from bagpipe.oracle.tables import OracleTable


@dataclass(frozen=True, slots=True, eq=False)
class CutIds:
    """The ids of a batch whose samples are those of trainer 0, then those of trainer 1, and so on."""

    ids: Sequence[NDArray[np.integer]]
    """One array a feature, in order of tables."""
    cuts: Int64s
    """[f, r]: where the ids of feature f begin that are trainer r's; one more for the end."""


class Reader:
    """Reads batches into shards, which `threads` share."""

    ids_shared_min = 20_000
    """A pass over fewer ids takes no longer than waking a thread."""

    def __init__(self, tables: Sequence[OracleTable], shards: Sequence[Shard], window_max: int, threads: int) -> None:
        self.tables, self.shards = tuple(tables), list(shards)
        self._workers = Workers(threads, "bagpipe-oracle")
        self._names = [name for table in tables for name in table.features]
        self.features: Int64s = np.cumsum([0] + [len(table.features) for table in tables]).astype(np.int64)
        """[t]: the first feature of table t; one more for the end."""
        self._last_ids = np.array([ANY_ID if table.rows is None else table.rows - 1 for table in tables], np.uint64)
        self._gaps: Int64s = np.zeros((len(tables), window_max + 2), np.int64)
        self._shares_work = False

    def read(self, ids: Sequence[NDArray[np.integer]], iteration: int, window: int, keep: int, keep_plan: int) -> Batch:
        """Enter the batch of an iteration behind `window` others: as `kernels.read`. An error changes nothing.

        What it found about gaps is valid until the next call. Rows without an array are forgotten that were last read
        before the window and evicted before plan `keep_plan`.
        """
        flat = self._flat(ids, iteration)
        positions = np.zeros(len(flat) + 1, np.int64)
        np.cumsum([len(values) for values in flat], out=positions[1:])
        self._shares_work = self._workers.num_threads > 1 and positions[-1] >= self.ids_shared_min
        addresses = np.array([address_of(values) for values in flat], np.uint64)
        inverse, counts = np.empty(positions[-1], np.int32), np.zeros(len(self.tables), np.int64)
        batch = Batch(addresses, positions, self.features, self._last_ids, inverse, counts, self._gaps)
        done: list[Shard] = []

        def read(shard: Shard) -> None:
            shard.enter(batch, iteration, window, keep_plan)
            bad = kernels.read(shard.state, shard.rings, batch, shard.previous, iteration, window, keep)
            if bad >= 0:
                raise self._out_of_range(bad, flat[bad], iteration)
            done.append(shard)

        try:
            self.on_all(read)
        except BaseException:
            self.unread(iteration, window, keep, done)
            raise
        return batch

    def unread(self, iteration: int, window: int, keep: int, shards: Sequence[Shard] | None = None) -> None:
        """Take back what the last `read` has done."""
        for shard in self.shards if shards is None else shards:
            kernels.unread(shard.state, shard.rings, shard.previous, iteration, window, keep)

    def on_all(self, work: Callable[[Shard], None]) -> None:
        """Do something with every shard, on as many threads as there are."""
        if self._shares_work:
            self._workers.run([partial(work, shard) for shard in self.shards])
        else:
            for shard in self.shards:
                work(shard)

    def close(self) -> None:
        """Let the threads go."""
        self._workers.close()

    def _flat(self, ids: Sequence[NDArray[np.integer]], number: int) -> list[Int64s]:
        """For each feature a contiguous array of 64-bit numbers."""
        if len(ids) != len(self._names):
            raise BatchError(
                f"batch {number} has ids of {len(ids)} features: give one array for each of {len(self._names)}"
            )
        flat = []
        for feature, given in zip(self._names, ids, strict=True):
            values = np.asarray(given)
            if values.dtype != np.int64 or values.ndim != 1 or not values.flags.c_contiguous:
                if values.size and not np.can_cast(values.dtype, np.int64):
                    raise BatchError(
                        f"batch {number}: ids of feature {feature!r} are {values.dtype}: give 64-bit integers"
                    )
                values = np.ascontiguousarray(values, np.int64).reshape(-1)
            flat.append(values)
        return flat

    def _out_of_range(self, feature: int, ids: Int64s, number: int) -> ValueRangeError:
        """The first id that is no row of its table."""
        table = self.tables[int(np.searchsorted(self.features, feature, "right")) - 1]
        outside = ids[(ids < 0) | (ids >= (table.rows or 0))]
        return ValueRangeError(
            f"batch {number}: feature {self._names[feature]!r} has id {outside[0]}, out of range for table "
            f"{table.name!r} ({table.rows} rows): raise the table's rows or check the data"
        )
