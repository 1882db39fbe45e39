"""Checkpoints as users ask for them: where, how often, what of a run is noted in them, and which one to go on from.

A checkpoint of another model, row optimizer, seed or data is refused by naming the difference, before anything has
changed (I8).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from torch import nn

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import MANIFEST, Facts, InitialEntry, TableEntry, VocabularyEntry, encode_manifest
from bagpipe.checkpoint.reading import Checkpoint
from bagpipe.cluster.context import Launch
from bagpipe.errors import CheckpointError, ConfigError
from bagpipe.initial import Constant, Initial, Joined, Normal, Uniform
from bagpipe.layers import Binding
from bagpipe.layout import RowLayout
from bagpipe.opening import first_values
from bagpipe.store import Store
from bagpipe.store.base import Marked
from bagpipe.store.local import LocalStore
from bagpipe.store.recorded import Recorded
from bagpipe.trainer.keeping import Keeping, Start, Writer
from bagpipe.trainer.source import Source

Resume = bool | Literal["auto"] | str | Path | None
NAME = "checkpoints"
"""Of the directory of checkpoints in a run's directory."""
LAUNCH = "written_by_launch"
"""What manifests note of the launch that wrote them; empty: none."""


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Where checkpoints go, and how often; `bagpipe.accelerate(..., checkpoint=...)` takes one.

    There is one more at the end of the data. They are written beside training, which goes on meanwhile.
    """

    directory: str | Path = field(kw_only=False)
    """Of a run of its own: new, or with checkpoints of it that are gone on from."""
    every: int = 100
    """Iterations from one to the next."""
    keep: int = 3
    """How many of the last ones stay, with all that they build on."""
    full_every: int = 10
    """Every so many of them all rows are written, in the others those that have changed since the one before."""
    compress: Literal["zstd"] | None = None
    """How the files of rows are packed."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Plain values to be noted in each."""
    data: str = ""
    """What tells the data and their order from others, where that is known; the first batch is compared anyway."""
    vocabulary: Mapping[str, str] = field(default_factory=dict)
    """Files that say which value each row stands for, and their checksums: noted in each, too."""

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"checkpoint.every is {self.every!r}: give a whole number of iterations, at least 1")
        if not isinstance(self.directory, str | Path) or Path(self.directory).is_file():
            raise ConfigError(f"checkpoint.directory is {self.directory!r}: give the path of a directory")
        if not isinstance(self.about, Mapping) or not all(isinstance(name, str) for name in self.about):
            raise ConfigError(f"checkpoint.about is {self.about!r}: give a dict of names to plain values")
        try:
            json.dumps(dict(self.about), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"checkpoint.about can't be noted as JSON: {error}: give plain values") from error
        self.open()

    def open(self) -> Checkpoints:
        """The directory."""
        return Checkpoints(self.directory, keep=self.keep, full_every=self.full_every, compress=self.compress)


@dataclass(frozen=True)
class Kept:
    """How a run is kept, and where it goes on: the same for all of its trainers."""

    facts: Facts
    checkpointing: Checkpointing | None = None
    checkpoint: Checkpoint | None = None
    """The one that the run goes on from."""
    start: Start | None = None
    """Where it goes on, be it from that checkpoint or from a mark of the servers."""
    marks_every: int | None = None
    """Iterations between marks that servers can return to."""
    mark: int | None = None
    """The mark that servers have returned to, if that is where it goes on."""

    @property
    def is_kept(self) -> bool:
        """Whether marks are made, or gone on from."""
        return (self.checkpointing, self.start, self.mark, self.marks_every) != (None, None, None, None)

    @property
    def point(self) -> str:
        """Where it goes on: the same text on two trainers only if they have found the same."""
        if self.mark is not None:
            return f"mark {self.mark}"
        if self.checkpoint is None:
            return "the beginning"
        _, checksum = encode_manifest(self.checkpoint.manifest)
        return f"the checkpoint after {self.checkpoint.done} iterations with checksum {checksum}"

    def open(self, store: Store, rank: int) -> tuple[Store, Keeping | None]:
        """A store that was just opened as one that can be kept, with the rows to go on with, and what keeps a loop."""
        if not self.is_kept:
            return store, None
        store = with_marks(store)
        if rank == 0:
            self.load(as_marked(store))
        return store, self.keeping(store, rank)

    def load(self, store: Marked) -> None:
        """Give a store the rows that the run goes on with; the first trainer does, before anything is trained."""
        if self.checkpoint is not None:
            names = [table.name for table in self.facts.tables]
            store.load(self.checkpoint.done, _parent(self.checkpoint), names)

    def keeping(self, store: Store, rank: int, *, shares_process: bool = False, threads: bool = True) -> Keeping | None:
        """What one trainer's loop is kept by; None: it is not."""
        if not self.is_kept:
            return None
        marked, start = as_marked(store), self.start
        if self.mark is not None:
            start = Start(self.mark, marked.kept(self.mark), is_checkpoint=False)
        return Keeping(
            marked,
            rank=rank,
            trainers=self.facts.trainers,
            marks_every=self.marks_every,
            checkpoints_every=None if self.checkpointing is None else self.checkpointing.every,
            writer=self._writer(marked) if rank == 0 else None,
            start=start,
            shares_process=shares_process,
            threads=threads,
        )

    def _writer(self, store: Marked) -> Writer | None:
        if self.checkpointing is None:
            return None
        checkpoints = self.checkpointing.open()
        found = [each.done for each in checkpoints.list()]
        if self.start is not None and self.start.done in found:
            from_there = self.checkpoint is None or _parent(self.checkpoint) == checkpoints.directory.resolve()
            checkpoints.continue_from(self.start.done if from_there else None)
            if self.checkpoint is not None and from_there and found[-1] > self.start.done:
                # Else who goes on before there is another one would do so from the future that was left.
                checkpoints.discard_after(self.start.done)
        compress = self.checkpointing.compress
        return Writer(checkpoints, store, self.facts, compress=compress, forget=self.marks_every is None)


def start_of(checkpoint: Checkpoint | None) -> Start | None:
    """Where a run goes on from a checkpoint."""
    if checkpoint is None:
        return None
    return Start(checkpoint.done, {name: checkpoint.blob(name) for name in checkpoint.blobs()})


def keep_script(
    launch: Launch | None,
    source: Source,
    model: nn.Module,
    binding: Binding,
    layouts: Sequence[RowLayout],
    checkpointing: Checkpointing | None,
    resume: Resume,
    accumulate: int,
) -> Kept:
    """How a loop that a script has asked for is kept, and where it goes on; refused if it is that of another model."""
    checkpoint, start, mark, marks_every = None, None, None, None
    if launch is not None and checkpointing is not None:
        _check_place(Path(checkpointing.directory), launch.checkpoints)
    if launch is not None and launch.recovers:
        marks_every = launch.config.recovery.every
    if launch is not None and launch.done:  # a fault was recovered from: not where the script began
        mark = launch.done
    else:
        directory = None if checkpointing is None else checkpointing.directory
        if launch is not None and launch.generation and directory is not None:
            checkpoint = _written_by(launch, directory)
        checkpoint = checkpoint or find_checkpoint(resume, directory)
        start = start_of(checkpoint)
    facts = make_facts(
        layouts,
        binding,
        trainers=1 if launch is None else launch.trainers,
        servers=0 if launch is None else len(launch.servers),
        accumulate=accumulate,
        checkpointing=checkpointing,
        first_ids=source.first_ids,
        launch="" if launch is None else launch.name,
    )
    if checkpoint is not None:
        check_same_run(checkpoint, facts)
    if start is not None:
        start.check(model, [layer.module for layer in binding.layers])
    return Kept(facts, checkpointing, checkpoint, start, marks_every, mark)


def _written_by(launch: Launch, directory: str | Path) -> Checkpoint | None:
    """The newest that this launch has written, before a fault; not what lay there when it began."""
    own = [each for each in Checkpoints(directory).list() if each.manifest.config.get(LAUNCH) == launch.name]
    return own[-1] if own else None


def _check_place(directory: Path, places: Sequence[str]) -> None:
    """ConfigError if the servers of a launch would refuse to write there, at the first checkpoint."""
    if places and not any(directory.resolve().is_relative_to(Path(place).resolve()) for place in places):
        raise ConfigError(
            f"checkpoint.directory is {directory}: servers of this launch use only what is in or below "
            f"{', '.join(places)}: start bagpipe launch with --checkpoints DIR"
        )


def find_checkpoint(resume: Resume, directory: str | Path | None) -> Checkpoint | None:
    """The checkpoint that `resume` means: True or "auto" the last one of the directory, a path that one.

    A path is that of a checkpoint, of a directory of them, or of a run.
    """
    if resume is None or resume is False:
        _refuse_held(directory, "go on from it with resume=True")
        return None
    if resume is True or resume == "auto":
        if directory is None:
            raise ConfigError(f"resume={resume!r} goes on from checkpoint.directory: give checkpoint, or a path")
        latest = Checkpoints(directory).latest()
        if latest is None and resume is True:
            raise CheckpointError(f"{directory} holds no checkpoint to go on from: begin anew without resume")
        return latest
    if not isinstance(resume, str | Path):
        raise ConfigError(f"resume is {resume!r}: give True, False, 'auto', or a path")
    checkpoint = _at(Path(resume))
    if directory is not None and _parent(checkpoint) != Path(directory).resolve():
        _refuse_held(directory, f"resume names another, {checkpoint.directory}: go on from its own with resume=True")
    return checkpoint


def _at(path: Path) -> Checkpoint:
    if (path / MANIFEST).is_file():
        if not path.resolve().name.isdecimal():
            raise CheckpointError(f"{path} is not the name of a checkpoint, which is its number of iterations")
        return Checkpoints(path.resolve().parent).open(int(path.resolve().name))
    within = path / NAME if (path / NAME).is_dir() else path
    latest = Checkpoints(within).latest()
    if latest is None:
        raise CheckpointError(f"{path} holds no checkpoint to go on from: check the path")
    return latest


def _refuse_held(directory: str | Path | None, remedy: str) -> None:
    """ConfigError if there are checkpoints: they would be written over, or taken for those of the run that begins."""
    found = [] if directory is None else Checkpoints(directory).numbers()
    if found:
        raise ConfigError(
            f"{directory} holds checkpoints of a run already, the last after {found[-1]} iterations: {remedy}, or give "
            "another directory"
        )


def make_facts(
    layouts: Sequence[RowLayout],
    binding: Binding,
    *,
    trainers: int = 1,
    servers: int = 0,
    accumulate: int = 1,
    checkpointing: Checkpointing | None = None,
    first_ids: Callable[[], Mapping[str, npt.NDArray[np.int64]]] | None = None,
    launch: str = "",
) -> Facts:
    """What a run tells of itself in its checkpoints."""
    told = checkpointing or Checkpointing(Path())
    config = {
        **told.about,
        "accumulate": accumulate,
        "row_optimizers": {layout.table.name: _settings(layout) for layout in layouts},
        "first_rows": {layout.table.name: first_values(layout) for layout in layouts},
        "first_batch": "" if first_ids is None else f"{_checksum(first_ids()):08x}",
        LAUNCH: launch,
    }
    return Facts(
        tables=table_entries(layouts, binding),
        trainers=trainers,
        servers=servers,
        config=config,
        data=told.data,
        vocabulary=tuple(VocabularyEntry(path=path, checksum=told.vocabulary[path]) for path in told.vocabulary),
    )


def check_same_run(checkpoint: Checkpoint, facts: Facts) -> None:
    """CheckpointError that names the difference if this is the checkpoint of another model, seed or data."""
    checkpoint.check_tables(facts.tables)
    there, here = checkpoint.manifest.config, facts.config
    if there.get("accumulate") != here["accumulate"]:
        raise _other(checkpoint, "accumulate", there.get("accumulate"), here["accumulate"])
    for key, what in (
        ("row_optimizers", "the row optimizer"),
        ("first_rows", "what rows begin with, by the seed,"),
    ):
        saved = there.get(key, {})
        for table, value in here[key].items():
            if saved.get(table) != value:
                raise _other(checkpoint, f"{what} of table {table!r}", saved.get(table), value)
    data = (checkpoint.manifest.data, facts.data), (there.get("first_batch"), here["first_batch"])
    for saved, wanted in data:
        if saved and wanted and saved != wanted:
            raise _other(checkpoint, "a checksum of the data or its order", saved, wanted)


def table_entries(layouts: Sequence[RowLayout], binding: Binding) -> tuple[TableEntry, ...]:
    """The tables of a model, as checkpoints name them."""
    entries = []
    for number, layout in enumerate(layouts):
        layers = tuple(layer.name for layer in binding.layers if layer.table == number)
        entry = TableEntry(
            name=layout.table.name,
            rows=layout.table.rows,
            dims=layout.dims,
            width=layout.width,
            optimizer=layout.optimizer.name,
            layers=layers,
            initial=_initial_entries(layout),
        )
        entries.append(entry)
    return tuple(entries)


def as_marked(store: Store) -> Marked:
    """A store as one with marks; ConfigError if it has none."""
    if not hasattr(store, "return_to"):
        raise ConfigError(f"the rows are in a {type(store).__name__}, which can't be kept: leave checkpoint out")
    return cast("Marked", store)


def with_marks(store: Store) -> Store:
    """The same rows in a store that has marks."""
    return Recorded(store) if isinstance(store, LocalStore) else store


def _parent(checkpoint: Checkpoint) -> Path:
    return checkpoint.directory.parent.resolve()


def _other(checkpoint: Checkpoint, what: str, there: object, here: object) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.directory} is of another run: {what} is {there!r} there and {here!r} here: use what it was made "
        "with, or another checkpoint"
    )


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
