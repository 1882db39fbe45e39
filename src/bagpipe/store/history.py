"""What rows were at earlier marks: the old value of each row that is written after one, once a row and mark.

A table has one number a row, the epoch of its last write, which grows with every mark; a mark has pieces of (position,
epoch, value) of rows first written after it. A writer copies old values without a lock, then adds them and
sets the epochs under one, and only then changes rows; so whoever copies rows, and looks at their epochs after, knows
which copies are too new.

Old values take `bytes_max` of memory at most (I5). Beyond it the oldest marks are given up, but neither one that a
snapshot reads nor the last one: for a snapshot later marks are, and then what is needed goes to a disk, once a row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from bagpipe.arrays import Int32s, Int64s
from bagpipe.errors import StoreError
from bagpipe.failpoints import reach
from bagpipe.store.base import TablePart
from bagpipe.store.blocks import Block, Piece
from bagpipe.store.local import LocalStore
from bagpipe.store.spilled import SpilledBlock, SpillingBlocks

_REMEMBERED_MAX = 65_536
"""Epochs of marks, forgotten ones too."""
NEVER = np.iinfo(np.int32).max
"""The epoch of a position that holds no row yet."""


def pick_earlier(epochs: Int32s, positions: Int64s, epoch: int) -> tuple[Int64s, Int32s]:
    """The positions, from 0 up, of rows last written before an epoch, and the epoch of that."""
    there = positions[positions >= 0]
    earlier = there[epochs[there] < epoch]
    return earlier, epochs[earlier]


class Mark:
    """A point to return to. The history's lock is held by whoever reads or changes one."""

    def __init__(self, done: int, epoch: int, num_rows: Sequence[int]) -> None:
        self.done, self.epoch, self.num_rows = done, epoch, tuple(num_rows)
        self.pieces: list[list[Piece]] = [[] for _ in num_rows]
        """By table, of rows first written between this mark and the next."""
        self.blocks: list[Block] = []
        """Where they are."""
        self.pins = 0
        """Snapshots that need it."""
        self.forgotten = False
        """Nobody returns to it any more; a snapshot of this or an older one still needs the values."""
        self.gone: str | None = None
        """Why its values are not there any more."""


class History:
    """The marks of a local store, and the old values that go with them. It sees every write of that store."""

    def __init__(self, store: LocalStore, bytes_max: int | None = None, place: Path | None = None) -> None:
        self.bytes_max, self.place = bytes_max, place
        """Bytes of memory for old values, and a directory for more of them; None: that of temporary files."""
        self.blocks = SpillingBlocks(max((source.width for source in store.tables), default=1), bytes_max)
        self.lock = Lock()
        self.returns = 0
        """How often rows were made older; who copied rows meanwhile can't tell which ones."""
        self._store = store
        self._marks: list[Mark] = []
        self._epoch = 1
        self._epoch_of: dict[int, int] = {}
        self._changed = False
        """Whether anything was written since the last mark."""
        self._num_writing = 0
        self.epochs: list[Int32s] = [np.zeros(store.num_rows(table), np.int32) for table in range(len(store.tables))]
        """By table and position; replaced, under the lock, when a table grows."""

    # Marks

    def check_mark(self, done: int) -> None:
        """Refuse a mark that can't be made."""
        with self.lock:
            self._check_mark(done)

    def mark(self, done: int) -> None:
        """Let rows be returned to what they are now; a second time, if nothing was written meanwhile, does nothing."""
        with self.lock:
            self._check_mark(done)
            if self._marks and self._marks[-1].done == done and not self._marks[-1].forgotten:
                return
            self._epoch += 1
            self._marks.append(Mark(done, self._epoch, list(map(self._store.num_rows, range(len(self.epochs))))))
            self._epoch_of[done] = self._epoch
            if len(self._epoch_of) > _REMEMBERED_MAX:
                del self._epoch_of[min(self._epoch_of)]
            self._changed = False

    def marks(self) -> list[int]:
        """The marks that rows can be returned to."""
        with self.lock:
            return [mark.done for mark in self._marks if not mark.forgotten]

    def forget(self, before: int) -> None:
        """Drop the marks below this one."""
        with self.lock:
            for mark in self._marks:
                if mark.done < before:
                    mark.forgotten = True
            self._drop_unneeded()

    def check_return(self, done: int) -> None:
        """Refuse a return that can't be made."""
        with self.lock:
            self._check_at_rest("a return")
            self._find(done)

    def return_to(self, done: int) -> None:
        """Make all rows what they were at a mark; later marks are gone. If it fails, call it again."""
        with self.lock:
            self._check_at_rest("a return")
            mark = self._find(done)
            later = self._marks[self._marks.index(mark) :]
        for other in reversed(later):
            for table, pieces in enumerate(other.pieces):
                for piece in pieces:
                    self._store.put_back(table, piece.positions, piece.values)
        reach("history.returned")
        for table, num_rows in enumerate(mark.num_rows):
            self._store.truncate(table, num_rows)
        with self.lock:
            self._restore_epochs(mark, later)
            for other in later[1:]:
                self._drop(other, f"rows were returned to mark {done}")
            self._empty(mark)
            self._epoch, self._changed = mark.epoch, False
            self._epoch_of = {other: epoch for other, epoch in self._epoch_of.items() if other <= done}
            self.returns += 1

    def check_at_rest(self) -> None:
        """Refuse to replace rows while some are written."""
        with self.lock:
            self._check_at_rest("a new beginning")

    def reset(self) -> None:
        """Forget every mark, and all rows, which the store is about to lose."""
        with self.lock:
            self._check_at_rest("a new beginning")
            for mark in list(self._marks):
                self._drop(mark, "all rows were replaced")
            self._epoch_of, self._changed = {}, False
            self.epochs = [np.zeros(0, np.int32) for _ in self.epochs]
            self.returns += 1
        for table in range(len(self.epochs)):
            self._store.truncate(table, 0)

    # For snapshots

    def pin(self, done: int) -> Mark:
        """A mark whose values stay until it is unpinned."""
        with self.lock:
            mark = self._find(done)
            mark.pins += 1
            return mark

    def unpin(self, mark: Mark) -> None:
        """One snapshot less."""
        with self.lock:
            mark.pins -= 1
            self._drop_unneeded()

    def epoch_of(self, done: int) -> int | None:
        """Rows written after this mark have this epoch or a later one; None if the mark is not remembered."""
        with self.lock:
            return self._epoch_of.get(done)

    def pieces_since(self, mark: Mark, table: int) -> list[Piece]:
        """Old values of a table, in the order of marks; the lock is held."""
        return [piece for other in self._marks[self._marks.index(mark) :] for piece in other.pieces[table]]

    # For writers

    def look(self, parts: Sequence[TablePart], found: Sequence[Int64s]) -> Recording:
        """Copy the old values of rows that this write is the first to change since the last mark that is needed."""
        with self.lock:
            self._num_writing += 1
            mark = self._marks[-1] if self._marks else None
            epochs = [self.epochs[table] for table, _, _ in parts]
        change = Recording(self, [table for table, _, _ in parts], mark)
        try:
            if mark is not None:
                self._copy(change, mark, epochs, found)
        except BaseException:
            change.end()
            raise
        return change

    def _copy(self, change: Recording, mark: Mark, epochs: Sequence[Int32s], found: Sequence[Int64s]) -> None:
        earlier: list[tuple[Int64s, Int32s]] = []
        claimed: bool | None = None
        while claimed is None:  # with fewer rows, if marks were given up for that
            epoch, earlier = self._needed_epoch(), []
            for known, positions in zip(epochs, found, strict=True):
                earlier.append(pick_earlier(known, positions, epoch))
            claimed = self._claim(change, mark, [len(picked) for picked, _ in earlier])
        if not claimed:
            return
        for table, (picked, before), pieces in zip(change.tables, earlier, change.pieces, strict=True):
            start = 0
            for piece in pieces:
                stop = start + len(piece.positions)
                piece.positions[:], piece.before[:] = picked[start:stop], before[start:stop]
                self._store.gather(table, piece.positions, piece.values)
                start = stop

    def _needed_epoch(self) -> int:
        """Rows that were last written before it have values that some mark needs."""
        with self.lock:
            return max((mark.epoch for mark in self._marks if mark.pins or not mark.forgotten), default=0)

    def _claim(self, change: Recording, mark: Mark, counts: Sequence[int]) -> bool | None:
        """Make room for so many old values of each table; False if they are not needed any more.

        None: later marks were given up for it, so that fewer are needed.
        """
        with self.lock:
            change.pieces.clear()
            for table, count in zip(change.tables, counts, strict=True):
                change.pieces.append([])
                while count and mark.gone is None:
                    piece = mark.blocks[-1].cut(self._store.tables[table].width, count) if mark.blocks else None
                    if piece is None:
                        if not self._add_block(mark):
                            return None
                        continue
                    change.pieces[-1].append(piece)
                    change.use(mark.blocks[-1])
                    count -= len(piece.positions)
            return mark.gone is None

    def _commit(self, change: Recording, found: Sequence[Int64s]) -> None:
        with self.lock:
            is_there = change.mark is not None and change.mark.gone is None
            for number, (table, positions) in enumerate(zip(change.tables, found, strict=True)):
                epochs = self._grown(table, int(positions.max()) + 1)
                if change.mark is not None and is_there:
                    change.mark.pieces[table] += change.pieces[number]
                epochs[positions] = self._epoch
            self._changed = True

    def _end(self, change: Recording) -> None:
        with self.lock:
            self._num_writing -= 1
            for block in change.blocks:
                block.num_writers -= 1
                if block.is_unwanted:
                    self.blocks.give_back(block)
            if not self._marks:
                self.blocks.release()
        for block in change.blocks[:-1]:  # which are full
            if isinstance(block, SpilledBlock):
                block.let_go()

    def _grown(self, table: int, num_rows: int) -> Int32s:
        epochs = self.epochs[table]
        if num_rows > len(epochs):
            larger = np.full(max(num_rows, len(epochs) * 3 // 2), NEVER, np.int32)
            larger[: len(epochs)] = epochs
            self.epochs[table] = epochs = larger
        return epochs

    # The lock is held in all that follows

    def _check_at_rest(self, what: str) -> None:
        if self._num_writing:
            raise StoreError(f"{what} while {self._num_writing} writes are under way: wait for the writers first")

    def _check_mark(self, done: int) -> None:
        self._check_at_rest("a mark")
        last = max(self._epoch_of, default=-1)
        if done < last or (done == last and self._changed) or done < 0:
            raise StoreError(f"mark {done} comes after mark {last}: they are made in ascending order from 0 on")

    def _find(self, done: int) -> Mark:
        for mark in self._marks:
            if mark.done == done and not mark.forgotten:
                return mark
        there = [mark.done for mark in self._marks if not mark.forgotten]
        raise StoreError(f"there is no mark {done}: there are {there}; return to one of these, or load a checkpoint")

    def _restore_epochs(self, mark: Mark, later: Sequence[Mark]) -> None:
        for other in reversed(later):
            for epochs, pieces in zip(self.epochs, other.pieces, strict=True):
                for piece in pieces:
                    epochs[piece.positions] = piece.before
        for epochs, num_rows in zip(self.epochs, mark.num_rows, strict=True):
            epochs[num_rows:] = NEVER

    def _drop_unneeded(self) -> None:
        """From the oldest on only: a snapshot of an old mark needs the values of all later ones."""
        while self._marks and self._marks[0].forgotten and not self._marks[0].pins:
            self._drop(self._marks[0], "it was forgotten")

    def _drop(self, mark: Mark, why: str) -> None:
        self._marks.remove(mark)
        mark.gone = why
        self._empty(mark)
        if not self._marks:
            self.blocks.release()

    def _empty(self, mark: Mark) -> None:
        for block in mark.blocks:
            self.blocks.give_back(block)
        mark.blocks, mark.pieces = [], [[] for _ in self.epochs]

    def _add_block(self, mark: Mark) -> bool:
        """One more for the last mark, or else a mark less; False if later ones are, so that less is to be copied."""
        block: Block | None = self.blocks.take()
        oldest, why = self._marks[0], "allow more (recovery.history)"
        if block is None and (oldest.pins or oldest is mark):
            if self._give_up_later():
                return False
            try:
                block = self.blocks.take_on_disk(self.place)
            except OSError as error:
                why += f", or make room for more (in {self.place or 'the directory of temporary files'}: {error})"
        if block is not None:
            mark.blocks.append(block)
            return True
        self._drop(oldest, f"{self._too_much(oldest)}: {why}")
        if not oldest.forgotten:
            self._warn(oldest)
        return True

    def _give_up_later(self) -> bool:
        """Return no more to marks after the oldest, unless snapshots read them; whether there was any."""
        later = [mark for mark in self._marks[1:] if not mark.pins and not mark.forgotten]
        for mark in later:
            mark.forgotten = True
            self._warn(mark)
        return bool(later)

    def _too_much(self, mark: Mark) -> str:
        return f"rows changed since mark {mark.done} take more than the {self.bytes_max:,} B for old values"

    def _warn(self, mark: Mark) -> None:
        logging.getLogger("bagpipe").warning(
            "%s: that mark is given up, and after a fault training goes further back", self._too_much(mark)
        )


class Recording:
    """A write under way, with the old values that it has copied."""

    def __init__(self, history: History, tables: Sequence[int], mark: Mark | None) -> None:
        self.tables, self.mark = tables, mark
        self.pieces: list[list[Piece]] = []
        """By table of the write."""
        self.blocks: list[Block] = []
        """Where they are."""
        self._history = history

    def use(self, block: Block) -> None:
        """Values are copied there until the end."""
        if not self.blocks or self.blocks[-1] is not block:
            block.num_writers += 1
            self.blocks.append(block)

    def commit(self, found: Sequence[Int64s]) -> None:
        """The old values are the mark's now, and the rows are known to be newer."""
        self._history._commit(self, found)
        reach("history.saved")

    def end(self) -> None:
        """The write is over."""
        self._history._end(self)
