"""Checkpoints as users ask for them: where, how often, and what of a run is noted in them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from torch import nn

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import InitialEntry, RunFacts, TableEntry, VocabularyEntry
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.errors import ConfigError
from bagpipe.initial import Constant, Initial, Joined, Normal, Uniform
from bagpipe.layers import Binding
from bagpipe.layout import RowLayout
from bagpipe.resuming import Resume, check_point, find_initial_point, find_resume_point
from bagpipe.store import Store
from bagpipe.store.base import Marked
from bagpipe.store.local import LocalStore
from bagpipe.store.versioned import VersionedStore
from bagpipe.store.views import StoreView
from bagpipe.trainer.checkpointer import NEVER, Checkpointer, Periods

if TYPE_CHECKING:
    from bagpipe.build import Spec

LAUNCH = "written_by_launch"
"""What manifests note of the launch that wrote them; empty: none."""


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Where checkpoints go, and how often; `bagpipe.prepare(..., checkpoint=...)` takes one.

    There is one more at the end of each epoch. They are written beside training, which goes on meanwhile.
    """

    directory: str | Path | None = field(kw_only=False)
    """Of a run of its own: new, or with checkpoints of it that are gone on from. None: nothing is saved, and the run
    only begins with `init_from`."""
    every: int | None = 100
    """Iterations from one to the next; None: only those at the end of an epoch."""
    keep: int = 3
    """How many of the last ones stay, with all that they build on."""
    init_from: str | Path | None = None
    """A checkpoint of another run, a directory of them, or a run: rows, dense part and optimizer states begin as they
    are there, and everything else as in a new run. Where the run has checkpoints of its own, `resume` goes before."""
    resume: Resume = None
    """Go on from a checkpoint: True from the last one of `directory`, "auto" from there if there is one, or the path of
    a checkpoint, of a directory of them, or of a run."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Plain values to be noted in each."""
    data: str = ""
    """What tells the data and their order from others, where that is known; the first batch is compared anyway."""
    vocabulary: Mapping[str, str] = field(default_factory=dict)
    """Files that say which value each row stands for, and their checksums: noted in each, too."""

    def __post_init__(self) -> None:
        if self.every is not None and (
            isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1
        ):
            raise ConfigError(
                f"checkpoint.every is {self.every!r}: give a whole number of iterations, at least 1, or None"
            )
        if self.directory is None and self.init_from is None and not self.resume:
            raise ConfigError("checkpoint.directory is None: give the path of a directory, init_from or resume")
        if self.directory is not None and (
            not isinstance(self.directory, str | Path) or self.directory == "" or Path(self.directory).is_file()
        ):
            raise ConfigError(f"checkpoint.directory is {self.directory!r}: give the path of a directory")
        if self.init_from is not None and not isinstance(self.init_from, str | Path):
            raise ConfigError(f"checkpoint.init_from is {self.init_from!r}: give the path of a checkpoint or a run")
        if not isinstance(self.about, Mapping) or not all(isinstance(name, str) for name in self.about):
            raise ConfigError(f"checkpoint.about is {self.about!r}: give a dict of names to plain values")
        try:
            json.dumps(dict(self.about), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"checkpoint.about can't be noted as JSON: {error}: give plain values") from error
        Checkpoints(self.directory or "", keep=self.keep)  # which refuses what it can't keep

    def periods(self, recovery: int | float | None) -> Periods:
        """When the loop is saved, also to recover from."""
        is_saved = self.directory is not None
        return Periods(self.every if is_saved else None, recovery, final=is_saved)


@dataclass(frozen=True)
class Saving:
    """How a run is saved, and where it continues: the same for all of its trainers."""

    facts: RunFacts
    directory: Path | None = None
    """Of its checkpoints; None: there are none."""
    periods: Periods = NEVER
    keep: int = 3
    resume: ResumePoint = START
    restored: bool = False
    """Whether the rows of that point are in the store already."""
    generation: int = 0
    token: str = field(default_factory=lambda: os.urandom(4).hex())

    @property
    def is_active(self) -> bool:
        """Whether the run is saved, or continued."""
        return self.periods != NEVER or self.continues

    @property
    def continues(self) -> bool:
        """Whether something was trained before."""
        return self.resume != START

    @property
    def point(self) -> str:
        """Where it continues: the same text on two trainers only if they have found the same."""
        return f"{self.resume} with checksum {self.resume.checksum}" if self.resume.checkpoint else str(self.resume)

    @property
    def loads(self) -> bool:
        """Whether the store still has to be given the rows that the run continues with."""
        return self.continues and not self.restored

    def with_marks(self, store: Store) -> Store:
        """A store that was just opened as one that can be saved, if it has to be."""
        return with_marks(store) if self.is_active else store

    def restore(self, store: Store) -> None:
        """Give a store the rows that the run continues with; the first trainer does, before anything is trained."""
        as_marked(store).restore(self.resume, [table.name for table in self.facts.tables])

    def checkpointer(
        self, store: Store, rank: int, *, shares_process: bool = False, threads: bool = True
    ) -> Checkpointer | None:
        """What saves the loop of one trainer; None: it is not saved."""
        if not self.is_active:
            return None
        return Checkpointer(
            as_marked(store), self._open(rank), self.facts, self.periods, rank=rank, resume=self.resume,
            shares_process=shares_process, threads=threads,
        )  # fmt: skip

    def _open(self, rank: int) -> Checkpoints | None:
        if self.directory is None or self.periods == NEVER:
            return None
        checkpoints = Checkpoints(self.directory, keep=self.keep, generation=self.generation, token=self.token)
        done, at = self.resume.done, self.resume.checkpoint
        if rank == 0 and at is not None and at.parent == checkpoints.directory:
            if max(checkpoints.numbers(), default=done) > done:
                # Else who continues before there is another one would do so from the future that was left.
                checkpoints.discard_after(done)
            checkpoints.continue_from(done)
        return checkpoints


def find_point(checkpointing: Checkpointing, init_from: str | Path | None = None) -> ResumePoint:
    """Where a run continues, as the user has asked for it; `init_from` is for one that has said nothing of it."""
    init_from = checkpointing.init_from or init_from
    point = find_resume_point(checkpointing.resume, checkpointing.directory)
    if point == START and init_from is not None:
        return find_initial_point(init_from, checkpointing.directory)
    return point


def plan_saving(
    spec: Spec,
    checkpointing: Checkpointing | None,
    point: ResumePoint,
    *,
    trainers: int = 1,
    servers: int = 0,
    recovery: int | float | None = None,
    directory: Path | None = None,
    launch: str = "",
) -> Saving:
    """How the loop of a spec is saved, beginning at a point; CheckpointError if that is of another run.

    A launch has checkpoints for `recovery` too, which go to its `directory` where the user has named none, and a name.
    """
    if checkpointing is not None and checkpointing.directory is not None:
        directory = Path(checkpointing.directory)
    facts = make_facts(
        spec.layouts, spec.binding, checkpointing, data=spec.data, trainers=trainers, servers=servers,
        model=spec.model, accumulate=spec.accumulate,
        first_ids=None if spec.source is None else spec.source.first_ids, launch=launch,
    )  # fmt: skip
    check_point(point, facts, spec.model, spec.binding)
    if checkpointing is None:
        return Saving(facts, directory, Periods(None, recovery), resume=point)
    return Saving(facts, directory, checkpointing.periods(recovery), checkpointing.keep, point)


def recovery_period(every: int | str) -> int | float:
    """`recovery.every` as `Periods` has it."""
    if isinstance(every, int):
        return every
    return 0.0 if every == "auto" else float(every.removesuffix("s"))


def make_facts(
    layouts: Sequence[RowLayout],
    binding: Binding,
    told: Checkpointing | None = None,
    *,
    data: str = "",
    trainers: int = 1,
    servers: int = 0,
    model: nn.Module | None = None,
    accumulate: int = 1,
    first_ids: Callable[[], Mapping[str, npt.NDArray[np.int64]]] | None = None,
    launch: str = "",
) -> RunFacts:
    """What a run tells of itself in its checkpoints, and what the user has `told` of it."""
    vocabulary = {} if told is None else told.vocabulary
    config = {
        **({} if told is None else told.about),
        "accumulate": accumulate,
        "row_optimizers": {layout.table.name: _settings(layout) for layout in layouts},
        "first_rows": {layout.table.name: layout.first_values for layout in layouts},
        "first_batch": "" if first_ids is None else f"{_checksum(first_ids()):08x}",
        LAUNCH: launch,
    }
    return RunFacts(
        tables=table_entries(layouts, binding),
        trainers=trainers,
        servers=servers,
        config=config,
        aliases={} if model is None else _aliases(model),
        data=data if told is None else told.data or data,
        vocabulary=tuple(VocabularyEntry(path=path, checksum=vocabulary[path]) for path in vocabulary),
    )


def table_entries(layouts: Sequence[RowLayout], binding: Binding) -> tuple[TableEntry, ...]:
    """The tables of a model, as checkpoints name them."""
    entries = []
    for number, layout in enumerate(layouts):
        layers = [layer for layer in binding.layers if layer.table == number]
        entry = TableEntry(
            name=layout.table.name,
            rows=layout.table.rows,
            dims=layout.dims,
            width=layout.width,
            optimizer=layout.optimizer.name,
            layers=tuple(layer.name for layer in layers),
            initial=_initial_entries(layout),
            weight_rows=None if layout.table.rows is None else layers[0].module.num_embeddings,
        )
        entries.append(entry)
    return tuple(entries)


def _aliases(model: nn.Module) -> dict[str, str]:
    """The further names of what a model has under several, each with the first one."""
    first: dict[int, str] = {}
    everything = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    named = [(name, first.setdefault(id(value), name)) for name, value in everything]
    return {name: earlier for name, earlier in named if name != earlier}


def as_marked(store: Store) -> Marked:
    """A store as one with marks, also where trainers have a view of it each; ConfigError if it has none."""
    rows = store.shared if isinstance(store, StoreView) else store
    if not hasattr(rows, "restore"):
        raise ConfigError(
            f"{type(rows).__name__} does not support checkpoints: use the memory or mapped store, or leave checkpoint "
            "out"
        )
    return cast("Marked", rows)


def with_marks(store: Store) -> Store:
    """The same rows in a store that has marks."""
    return VersionedStore(store, rollback=False) if isinstance(store, LocalStore) else store


def _settings(layout: RowLayout) -> dict[str, Any]:
    """What must be the same of a row optimizer; its learning rate may change, and is kept with its counters."""
    optimizer = layout.optimizer
    settings = {name: getattr(optimizer, name) for name in optimizer.settings}
    return {"name": optimizer.name} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()
    }


def _checksum(ids: Mapping[str, npt.NDArray[np.int64]]) -> int:
    checksum = 0
    for name in sorted(ids):
        checksum = zlib.crc32(np.ascontiguousarray(ids[name], np.int64).data, zlib.crc32(name.encode(), checksum))
    return checksum


def _initial_entries(layout: RowLayout) -> tuple[InitialEntry, ...] | None:
    """How each vector of a row begins, where that can be told."""
    entries = [_initial_entry(part, column) for part, column in _parts(layout)]
    known = [entry for entry in entries if entry is not None]
    return tuple(known) if len(known) == len(entries) else None


def _parts(layout: RowLayout) -> list[tuple[Initial, int]]:
    """What fills each vector of a row, and with which column of its own it begins."""
    if isinstance(layout.initial, Joined) and layout.initial.dims == layout.dims:
        return [(part, 0) for part in layout.initial.parts]
    return [(layout.initial, column) for column in layout.columns]


def _initial_entry(initial: Initial, column: int) -> InitialEntry | None:
    if isinstance(initial, Uniform | Normal):
        kind, value = ("uniform", initial.scale) if isinstance(initial, Uniform) else ("normal", initial.std)
        column += initial.column
        return InitialEntry(kind=kind, value=value, table=initial.table, seed=initial.seed, column=column)
    if isinstance(initial, Constant):
        return InitialEntry(kind="constant", value=initial.value)
    return None
