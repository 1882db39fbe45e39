"""Who trains: this process alone, or as one of several trainers, be they threads or processes of a launch.

A world opens what differs between them, so that one builder makes every training loop and a script reads the same
wherever it runs. What only several trainers need is loaded where there are several.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagpipe.config import cache_size, check_store, store_memory_bytes
from bagpipe.errors import ConfigError
from bagpipe.layout import RowLayout
from bagpipe.oracle.capacity import make_oracle
from bagpipe.store import MappedStore, MemoryStore, Store
from bagpipe.store.mapped import RESIDENT_BYTES_MAX
from bagpipe.trainer.ranks import refuse_ranks
from bagpipe.trainer.source import LocalPlans, Opened, Source
from bagpipe.trainer.stages import Driver, Threads

if TYPE_CHECKING:
    from bagpipe.build import Spec
    from bagpipe.checkpointing import Checkpointing, Saving
    from bagpipe.trainer.checkpointer import Checkpointer
    from bagpipe.trainer.loop import TrainLoop

OpenStore = Callable[[Sequence[RowLayout]], Store]


class World:
    """This process, which trains alone: it reads its loader, plans for itself and has the rows."""

    trainer: int = 0
    """Which of the trainers this is."""
    trainers: int = 1
    works_beside: bool = True
    """Whether threads may load and save rows beside training."""

    @staticmethod
    def from_environment() -> World:
        """The world of this process: that of the launch which it belongs to, or its own. ConfigError if torchrun or
        torch.distributed has made it one of several ranks."""
        _current[-1].refuse_others()
        return _current[-1]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This is the world of the process while the block runs."""
        _current.append(self)
        try:
            yield
        finally:
            _current.remove(self)

    def refuse_others(self) -> None:
        """ConfigError if this process is one of several ranks that know nothing of each other's rows."""
        refuse_ranks(os.environ.get("WORLD_SIZE"))

    def driver(self) -> Driver:
        """What runs the stages of a loop."""
        return Threads()

    def open_source(self, loader: Iterable[Any], accumulate: int) -> Source | None:
        """What reads the loader; None: another process does."""
        return Source(loader, accumulate)

    def open_plans(self, spec: Spec, saving: Saving | None, driver: Driver) -> Opened:  # noqa: ARG002
        """Plans for the first epoch, or for one that can't go on with those before."""
        plans, source = spec.plans, spec.source
        assert source is not None
        oracle = make_oracle(
            spec.binding.tables, [layout.width for layout in spec.layouts], cache_size(plans.cache),
            source.first_ids(), source.other_ids(),
            lookahead=plans.lookahead, policy=plans.policy, options=plans.options,
        )  # fmt: skip
        return Opened(LocalPlans(source, oracle, goes_on=not (spec.once or source.is_iterator)), oracle.capacity)

    def open_rows(self, spec: Spec, saving: Saving | None) -> Store:
        """The store for the rows, which can be saved if they are to be."""
        store = open_local_rows(spec.store, spec.layouts, spec.resident_bytes_max)
        return store if saving is None else saving.with_marks(store)

    def plan_saving(self, spec: Spec, checkpoint: Checkpointing | None) -> Saving | None:
        """How the loop is saved, and where it continues; None: neither."""
        if checkpoint is None:
            return None
        from bagpipe.checkpointing import find_point, plan_saving

        return plan_saving(spec, checkpoint, find_point(checkpoint))

    def checkpointer(self, saving: Saving, store: Store) -> Checkpointer | None:
        """What saves the loop."""
        return saving.checkpointer(store, self.trainer)

    def any_busy(self, loop: TrainLoop, busy: bool, what: str) -> bool:  # noqa: ARG002
        """Whether a trainer is still busy with what all of them need, once each has said so."""
        return busy


_current = [World()]


def open_local_rows(place: str | Path | OpenStore, layouts: Sequence[RowLayout], resident_bytes_max: int) -> Store:
    """A store in the memory or in files of this process, or one that a function opens."""
    if callable(place):
        return place(layouts)
    if place == "memory":
        return MemoryStore(layouts)
    if isinstance(place, str) and place != "mapped":
        check_store(place)
    return MappedStore(layouts, None if place == "mapped" else place, resident_bytes_max=resident_bytes_max)


def memory_of_files(store: str | Path | OpenStore, store_memory: str | None) -> int:
    """How many bytes of rows on disk may be in memory; ConfigError where that says nothing."""
    if store_memory is None:
        return RESIDENT_BYTES_MAX
    if callable(store):
        raise ConfigError(f"store_memory ({store_memory!r}) is for the function that opens the store: leave it out")
    return store_memory_bytes(store_memory, store)
