"""Who trains: this process alone, or as one of the trainers that a launch has started.

A world says where plans come from and where rows live, so that a script reads the same wherever it runs. What only
several trainers need is loaded where there are several.
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

if TYPE_CHECKING:
    from bagpipe.checkpointing import Checkpointing, Saving
    from bagpipe.script import Script

OpenStore = Callable[[Sequence[RowLayout]], Store]


class World:
    """This process, which trains alone: it reads its loader, plans for itself and has the rows."""

    trainer: int = 0
    """Which of the trainers this process is."""
    trainers: int = 1

    @staticmethod
    def current() -> World:
        """The world of this process: that of a launch, if it belongs to one."""
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
        """ConfigError if torchrun has started this process as one of several."""
        refuse_ranks(os.environ.get("WORLD_SIZE"))

    def open_source(self, loader: Iterable[Any], accumulate: int) -> Source:
        """What reads the loader."""
        return Source(loader, accumulate)

    def open_plans(self, script: Script) -> Opened:
        """Plans for the first epoch, or for one that can't go on with those before."""
        plans, source = script.plans, script.source
        oracle = make_oracle(
            script.binding.tables, [layout.width for layout in script.layouts], cache_size(plans.cache),
            source.first_ids(), source.other_ids(),
            lookahead=plans.lookahead, policy=plans.policy, options=plans.options,
        )  # fmt: skip
        return Opened(LocalPlans(source, oracle, goes_on=not script.once), oracle.capacity)

    def open_rows(self, place: str | Path | OpenStore, layouts: Sequence[RowLayout], resident_bytes_max: int) -> Store:
        """The store for rows of these layouts."""
        return place(layouts) if callable(place) else open_local_rows(place, layouts, resident_bytes_max)

    def plan_saving(self, script: Script, checkpoint: Checkpointing | None) -> Saving | None:
        """How the loop of a script is saved, and where it continues; None: neither."""
        if checkpoint is None:
            return None
        from bagpipe.checkpointing import plan_script

        return plan_script(None, script, checkpoint)


_current = [World()]


def open_local_rows(place: str | Path, layouts: Sequence[RowLayout], resident_bytes_max: int) -> Store:
    """A store in the memory or in files of this process."""
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
