"""Evaluation whose rows are read ahead: while the model computes a batch, the rows of the next one are looked up.

It creates no row and changes none. What the store has at its beginning is what the model sees to its end; a model that
is trained meanwhile is refused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bagpipe.adapt import Adapter
from bagpipe.embedding import TableView, check_range
from bagpipe.errors import BatchError, ModelError
from bagpipe.pooling import GivenIds, Pooling
from bagpipe.trainer.read_ahead import Held, ReadAhead

if TYPE_CHECKING:
    from bagpipe.trainer.loop import TrainLoop

END_S = 10.0
"""For a loader to give the batch that it is at, when nobody waits for it any more."""

_log = logging.getLogger(__name__)


class _Read(NamedTuple):
    """A batch, and the rows that it names."""

    batch: Any
    views: list[TableView]
    given: list[GivenIds]
    held: Held | None


class EvaluationLoader:
    """The batches of a loader, as they are; under `torch.no_grad()` the model finds their rows at hand."""

    def __init__(self, loop: TrainLoop, loader: Iterable[Any]) -> None:
        if not isinstance(loader, Iterable):
            raise BatchError(f"the loader is a {type(loader).__name__}: give something that yields batches")
        self._loop, self._loader = loop, loader
        self._batches, self._seconds, self._wait_s = 0, 0.0, 0.0

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._loop.show_store("rows are to be read ahead for evaluation")
        self._batches, self._seconds, self._wait_s = 0, 0.0, 0.0
        lookups = self._loop.lookups
        before = (lookups.view, lookups.recording, lookups.pooling)
        reader = _Reader(self._loop, self._loader)
        began = time.perf_counter()
        own: list[TableView] | None = None
        try:
            while (read := self._next(reader)) is not None:
                if self._loop.has_updates or (own is not None and lookups.view is not own):
                    raise ModelError(
                        "the model was trained while batches were read ahead for evaluation: end that loop first, or "
                        "evaluate on a plain loader"
                    )
                if read.held is not None:
                    read.held.compare()
                    if read.held.error is not None:
                        raise read.held.error
                own = read.views
                lookups.view, lookups.recording, lookups.pooling = own, False, Pooling()
                lookups.pooling.begin(read.given)
                self._batches += 1
                yield read.batch
                self._seconds = time.perf_counter() - began
        finally:
            if own is not None and lookups.view is own:
                lookups.view, lookups.recording, lookups.pooling = before
            reader.close()

    def stats(self) -> dict[str, Any]:
        """Of the evaluation under way, or the last one: batches, their rate, and how long the model waited for them."""
        rate = self._batches / self._seconds if self._seconds else None
        return {"batches": self._batches, "batches_per_second": rate, "wait_seconds": self._wait_s}

    def _next(self, reader: _Reader) -> _Read | None:
        before = time.perf_counter()
        try:
            return reader.take()
        finally:
            self._wait_s += time.perf_counter() - before


class _Reader:
    """A thread that reads one batch more than was taken."""

    def __init__(self, loop: TrainLoop, loader: Iterable[Any]) -> None:
        self._loop, self._batches = loop, iter(loader)
        self._ahead, self._number = ReadAhead(loader), 0
        self._features = [name for table in loop.binding.tables for name in table.features]
        self._adapter: Adapter | None = None
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[_Read | Exception | None] = SimpleQueue()
        # Nobody is kept from leaving by a loader that blocks.
        self._thread = threading.Thread(target=self._run, name="bagpipe-evaluation", daemon=True)
        self._thread.start()
        self._asked.put(True)

    def take(self) -> _Read | None:
        """The next batch; None after the last. What went wrong with it is raised in its place."""
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            self._asked.put(True)
        return answer

    def close(self) -> None:
        """End the thread, after the batch that it is at."""
        self._asked.put(False)
        self._thread.join(END_S)
        if self._thread.is_alive():
            _log.warning("a loader has given no batch for %g s, and is left to itself", END_S)

    def _run(self) -> None:
        answer: _Read | Exception | None
        while self._asked.get():
            try:
                answer = self._read()
            except Exception as error:
                answer = error
            self._answers.put(answer)

    def _read(self) -> _Read | None:
        self._ahead.pin()
        try:
            batch = next(self._batches)
        except StopIteration:
            return None
        if self._adapter is None:
            self._adapter = Adapter(batch)
            self._adapter.require(self._features)
        views, given = [], []
        ids = self._adapter.extract(batch, self._features, self._number)
        for number, table in enumerate(self._loop.binding.tables):
            parts = [ids[name] for name in table.features]
            check_range(table, parts)
            unique, places = np.unique(np.concatenate(parts), return_inverse=True)
            rows = torch.from_numpy(self._loop.read_rows(number, unique)).to(self._loop.lookups.device)
            views.append(TableView(rows, np.arange(len(unique), dtype=np.int32), unique))
            ends = np.cumsum([len(part) for part in parts])
            own = np.split(places.astype(np.int32), ends[:-1])
            given += [
                GivenIds(self._adapter.ids_in(batch, name), of_feature, number)
                for name, of_feature in zip(table.features, own, strict=True)
            ]
        held = self._ahead.hold(self._number, batch)
        self._number += 1
        return _Read(batch, views, given, held)
