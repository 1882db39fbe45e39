"""When a training loop is kept, and how it goes on: marks of the store with what each trainer keeps, and checkpoints.

At a mark all trainers flush, meet, let the first one ask the store for it, meet again and go on (I2). What is written
to files is written beside training, one checkpoint at a time; what goes wrong there is raised in the loop (I6). Where
the first one has to wait for it, all meet again and again, so that nobody's wait comes to its deadline (I7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from bagpipe.checkpoint.directory import Checkpoints, Pending
from bagpipe.checkpoint.manifest import Facts
from bagpipe.checkpoint.shards import Compression
from bagpipe.checkpoint.tree import pack_tree
from bagpipe.errors import CheckpointError
from bagpipe.failpoints import reach
from bagpipe.server.limits import ServerLimits
from bagpipe.store.base import Marked
from bagpipe.trainer.background import Background
from bagpipe.trainer.kept import (
    FIRST,
    Attachable,
    Attached,
    Tree,
    blob_name,
    buffers_of,
    check_tensors,
    copied,
    dense_parameters,
    generator_states,
    is_own,
    read_kept,
    restore,
    set_generator_states,
    set_tensors,
)

ROUND_S = 10.0
"""From one meeting to the next while the first trainer waits for its files: well below the deadline of an exchange."""
BLOB_BYTES_MAX = ServerLimits().blob_bytes_max


class Loop(Protocol):
    """What is kept: a training loop between two iterations."""

    @property
    def model(self) -> nn.Module:
        """Whose dense part is kept."""

    @property
    def done(self) -> int:
        """Iterations of the run that are over."""

    def barrier(self) -> None:
        """Return when the store has every update so far."""

    def meet(self, what: str) -> None:
        """Return when all trainers are here."""

    def anywhere(self, flag: bool, what: str) -> bool:
        """Whether the flag is set on any trainer, once all are here."""

    def progress(self) -> Tree:
        """Where the loop is: counters of row optimizers, and the position in the data."""

    def go_on(self, progress: Mapping[str, Any]) -> None:
        """Begin where another loop was; before the first batch."""


@dataclass(frozen=True)
class Start:
    """Where a run goes on: after `done` iterations, with what its trainers kept then, by name.

    The rows are in the store already: returned to that mark, or loaded from that checkpoint.
    """

    done: int
    blobs: Mapping[str, bytes]
    """As `Marked.kept(done)` gives them, or a checkpoint."""
    is_checkpoint: bool = True
    """False: it is a mark, and a checkpoint of it may be missing."""

    @property
    def position(self) -> Mapping[str, Any]:
        """Where in the data it was."""
        position: Mapping[str, Any] = self.of(0)["loop"]["data"]
        return position

    def of(self, rank: int) -> Tree:
        """What that trainer kept; a trainer that was not there goes on as the first one, but for generators."""
        blob = self.blobs.get(blob_name(rank))
        if blob is None and rank == 0:
            raise CheckpointError(f"nothing of the first trainer was kept of {self.done} iterations: use another point")
        if blob is None:
            return self.of(0) | {"generators": None, "own": None}
        return read_kept(blob, blob_name(rank), self.done)

    def check(self, model: nn.Module, swapped: Sequence[nn.Module] = ()) -> None:
        """CheckpointError if the dense part of this model is another; `swapped` are its embedding layers."""
        first = self.of(0)
        check_tensors("parameter", first["parameters"], dense_parameters(model, swapped))
        check_tensors("buffer", first["buffers"], buffers_of(model))


class Writer:
    """Writes checkpoints of a store's marks."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        store: Marked,
        facts: Facts,
        *,
        compress: Compression | None = None,
        forget: bool = True,
    ) -> None:
        """With `forget` marks are there for checkpoints only, and dropped when these are written."""
        self._checkpoints, self._store, self._facts = checkpoints, store, facts
        self._compress, self._forget = compress, forget
        self._pending: Pending | None = None

    def progress(self) -> int:
        """Changes as files of the checkpoint under way come to be."""
        pending = self._pending
        return 0 if pending is None else pending.num_files()

    def write(self, done: int, blobs: Mapping[str, bytes]) -> None:
        """Write the checkpoint of a mark; CheckpointError if that can't be done, which says whether it is there."""
        with _failing(f"the checkpoint of iteration {done} can't be written", "the one before is still there"):
            self._write(done, blobs)
        with _failing(f"the store can't let go of what came before iteration {done}", "its checkpoint is complete"):
            self._store.settle(done)
            if self._forget:
                self._store.forget(done + 1)

    def _write(self, done: int, blobs: Mapping[str, bytes]) -> None:
        names = [table.name for table in self._facts.tables]
        pending = self._pending = self._checkpoints.begin(done)
        try:
            pending.add(self._store.save(done, pending.directory, names, since=pending.base, compress=self._compress))
            reach("checkpoint.rows.written")
            for name, blob in blobs.items():
                pending.write_blob(name, blob)
            pending.commit(self._facts)
        except BaseException:
            pending.abandon()
            raise


class Keeping:
    """One trainer's part in being kept. Every trainer of a run has one, and all with the same periods."""

    def __init__(
        self,
        store: Marked,
        *,
        rank: int = 0,
        trainers: int = 1,
        marks_every: int | None = None,
        checkpoints_every: int | None = None,
        writer: Writer | None = None,
        start: Start | None = None,
        shares_process: bool = False,
        threads: bool = True,
        round_s: float = ROUND_S,
    ) -> None:
        """Periods are in iterations; the first trainer has a `writer` where there are checkpoints.

        With `shares_process` other trainers are threads of the same process, whose generators the first one keeps.
        Without `threads` what is otherwise done beside training is done at once. `round_s` is how long the first one
        lets the others wait at once for what it writes.
        """
        self._store, self._rank, self._trainers = store, rank, trainers
        self._marks_every, self._checkpoints_every, self._writer = marks_every, checkpoints_every, writer
        self.start = start
        """Where the loop goes on, until it does."""
        self._keeps_generators = rank == 0 or not shares_process
        self._attached = Attached()
        self._saved: dict[str, Any] | None = None
        """States of attached objects to be restored, while the loop has not begun."""
        self._begun = self._off = False
        self._round_s = round_s
        self._sending = Background("bagpipe-keep", threads=threads)
        self._writing = Background("bagpipe-checkpoint", threads=threads)
        self._in_writing: int | None = None
        """The checkpoint under way."""
        self._last_written = start.done if start is not None and start.is_checkpoint else -1

    def restore(self, loop: Loop) -> None:
        """Let a loop that has not begun go on where it was kept; what is attached to it follows."""
        if self.start is None:
            return
        self.start.check(loop.model)
        first, own = self.start.of(0), self.start.of(self._rank)
        check_tensors("buffer", own["buffers"], buffers_of(loop.model))
        loop.go_on(first["loop"])
        set_tensors(dense_parameters(loop.model), first["parameters"])
        set_tensors(buffers_of(loop.model), own["buffers"])
        self._saved = first["attached"] | (own["own"] or {})
        self._generators = own["generators"]
        self._new_here = own["own"] is None
        self.start = None  # it may be large

    def attach(self, objects: Mapping[str, Attachable]) -> None:
        """Keep these too; where the loop goes on, they do at once."""
        if self._begun:
            raise CheckpointError(f"{', '.join(objects)}: attach before the first batch")
        self._attached.add(objects)
        for name, thing in objects.items() if self._saved is not None else ():
            if not (self._new_here and is_own(thing)):
                assert self._saved is not None
                restore(name, thing, self._saved)

    def _begin(self, loop: Loop) -> None:
        if self._saved is not None:
            own = {name for name, thing in self._attached.objects.items() if is_own(thing)}
            self._attached.check_names(self._saved.keys() | (own if self._new_here else set()))
            if self._generators is not None and self._keeps_generators:
                set_generator_states(self._generators)
            reach("resume.loaded")
        if not self._attached.asked:
            if self._checkpoints_every is not None:
                raise CheckpointError(
                    "checkpoints need to know what else has a state: call batches.attach(dense=optimizer, ...) with "
                    "the dense optimizer and schedulers before the first batch, or batches.attach() if there is nothing"
                )
            self._off = True
        self._begun, self._saved = True, None
        if not self._off:
            self._packed(self._captured(loop))  # what can't be kept is refused now rather than at the first mark

    def between(self, loop: Loop) -> None:
        """An iteration is over and the next one has not begun, or the first: make a mark if it is due."""
        if not self._begun:
            self._begin(loop)
            return
        self._sending.check()
        self._writing.check()
        done = loop.done
        if not self._off and done and done != self._last_written:
            checkpoint = self._is_due(done, self._checkpoints_every)
            if checkpoint or self._is_due(done, self._marks_every):
                self._mark(loop, checkpoint)

    def end(self, loop: Loop) -> None:
        """The data has ended: begin to write a last checkpoint, unless there is one."""
        if self._checkpoints_every is not None and loop.done > self._last_written:
            self._mark(loop, checkpoint=True)

    @contextmanager
    def ending(self, loop: Loop) -> Iterator[None]:
        """After the block nothing is under way, on any trainer; what went wrong is raised, unless the block raises."""
        try:
            yield
        except BaseException:
            for background in (self._sending, self._writing):
                with suppress(Exception):
                    background.wait()
            raise
        try:
            self._meet(loop, f"what is kept of {loop.done} iterations to be written", self._sending, self._writing)
        finally:
            self._writing.wait()

    def _is_due(self, done: int, every: int | None) -> bool:
        return every is not None and done % every == 0

    def _mark(self, loop: Loop, checkpoint: bool) -> None:
        done = loop.done
        loop.barrier()
        reach("mark.flushed")
        tree = self._captured(loop)
        if self._rank:
            self._store.keep(done, blob_name(self._rank), self._packed(tree))
            reach("mark.kept")
        before = (self._sending, self._writing) if checkpoint else (self._sending,)
        self._meet(loop, f"all trainers to be done with {done} iterations", *before)
        reach("mark.met")
        if self._rank == 0:
            self._store.mark(done)
            reach("mark.asked")
        loop.meet(f"the mark of {done} iterations")
        reach("mark.over")
        self._last_written = done if checkpoint else self._last_written
        if self._rank == 0:
            self._send(done, tree, checkpoint)

    def _meet(self, loop: Loop, what: str, *works: Background) -> None:
        """Return when all trainers are here and the first one is done with what it does beside training."""
        while loop.anywhere(any(work.is_busy(self._round_s) for work in works), what):
            pass

    def _send(self, done: int, tree: Tree, checkpoint: bool) -> None:
        """Have what this trainer keeps go where it belongs, beside training."""
        if checkpoint:
            self._in_writing = done
            self._writing.start(f"the checkpoint of iteration {done}", lambda: self._write(done, tree), self._progress)
        if self._marks_every is not None:
            self._sending.start(f"what is kept of iteration {done}", lambda: self._keep(done, tree))

    def _keep(self, done: int, tree: Tree) -> None:
        self._store.keep(done, FIRST, self._packed(tree))
        reach("mark.kept")
        in_writing = self._in_writing
        self._store.forget(done if in_writing is None else min(done, in_writing))

    def _write(self, done: int, tree: Tree) -> None:
        assert self._writer is not None, "the first trainer has a writer"
        kept = self._store.kept(done) if self._trainers > 1 else {}
        blobs = {name: blob for name, blob in kept.items() if name != FIRST}
        missing = [name for name in map(blob_name, range(1, self._trainers)) if name not in blobs]
        if missing:
            raise CheckpointError(f"the checkpoint of iteration {done} lacks what {missing} should have kept")
        self._writer.write(done, blobs | {FIRST: pack_tree(tree)})
        self._in_writing = None

    def _packed(self, tree: Tree) -> bytes:
        """What goes to a server."""
        blob = pack_tree(tree)
        if self._marks_every is not None and len(blob) > BLOB_BYTES_MAX:
            raise CheckpointError(
                f"parameters, buffers and attached states of trainer {self._rank} have {len(blob):,} B, and a server "
                f"keeps {BLOB_BYTES_MAX:,} of one with a mark: make them smaller, or set recovery.restarts_max = 0 and "
                "go on from checkpoints (checkpoint.every)"
            )
        return blob

    def _progress(self) -> object:
        return None if self._writer is None else self._writer.progress()

    def _captured(self, loop: Loop) -> Tree:
        """Everything of this trainer that the next iteration depends on."""
        tree: Tree = {
            "done": loop.done,
            "generators": generator_states() if self._keeps_generators else None,
            "buffers": copied(buffers_of(loop.model)),
            "own": self._attached.saved(own=True),
        }
        if self._rank == 0:
            tree |= {
                "parameters": copied(dense_parameters(loop.model)),
                "attached": self._attached.saved(own=False),
                "loop": copied(loop.progress()),
            }
        return tree


MakeKeeping = Callable[[int], Keeping]
"""Makes the keeping of a trainer, by its rank."""


@contextmanager
def _failing(what: str, but: str) -> Iterator[None]:
    """Turn any error into one that says what failed, and what did not."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}; {but}") from error
