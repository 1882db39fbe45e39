"""Which training loop each row optimizer was given to, without keeping either of them alive, and how a loop ends."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bagpipe.errors import ModelError
from bagpipe.kernels.parallel import Workers
from bagpipe.optim import PerTable, RowOptimizer
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.row_sync import RowSync

if TYPE_CHECKING:
    from bagpipe.trainer.batches import Batches

_sessions: weakref.WeakKeyDictionary[RowOptimizer | PerTable, weakref.ref[Batches]] = weakref.WeakKeyDictionary()


def session_of(rows: RowOptimizer | PerTable) -> Batches:
    """The training loop that a row optimizer was given to."""
    found = _sessions.get(rows)
    session = None if found is None else found()
    if session is None or session.closed:
        raise ModelError(f"this {type(rows).__name__} drives no rows: pass it to bagpipe.accelerate first")
    return session


def attach(rows: RowOptimizer | PerTable, batches: Batches) -> None:
    """Let `rows.step()` drive the rows of a session, without keeping the session alive."""
    session = weakref.ref(batches)

    def step(**options: Any) -> bool:
        found = session()
        assert found is not None, "a session that is gone has detached its optimizer"
        return found.step(**options)

    rows.attach(step)
    _sessions[rows] = session


def abandon(
    pipeline: Pipeline[Any], sync: RowSync | None, rows: RowOptimizer | PerTable, helpers: Sequence[Workers]
) -> None:
    """Let go of what a session has started, when it is over or nobody holds it any more."""
    pipeline.abandon()
    if sync is not None:
        sync.close()
    rows.detach()
    for workers in helpers:
        workers.close()
