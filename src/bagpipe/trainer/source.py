"""From a loader's batches to what the oracle reads, and from plans back to the batches.

The window of the oracle may hold hundreds of batches, so ids are dropped as soon as they are read: what remains is the
plan's `inverse`, half their size, from which they are made again. A loader that fails ends the data: what it gave
before is trained, then it is raised.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from bagpipe.adapt import Adapter
from bagpipe.embedding import check_range
from bagpipe.errors import BagpipeError, ConfigError, ValueRangeError
from bagpipe.loaders import Rereadable
from bagpipe.oracle.oracles import AnyOracle
from bagpipe.oracle.plan import Plan
from bagpipe.pooling import GivenIds
from bagpipe.trainer.pipeline import Counters
from bagpipe.trainer.read_ahead import Held, ReadAhead
from bagpipe.trainer.reading import Epochs, LookBack, Reading
from bagpipe.types import Table

if TYPE_CHECKING:
    from bagpipe.trainer.joint_update import Peers

Ids = npt.NDArray[np.int64]

NUM_OTHERS = 8
"""Batches that are looked at beside the first one, to divide the cache by."""


@dataclass(frozen=True, slots=True)
class Group:
    """The micro-batches of one iteration, without their ids."""

    batches: list[Any]
    lengths: list[tuple[int, ...]]
    """For each micro-batch the number of ids of each feature."""
    held: Sequence[Held | None] = ()
    """What tells whether the loader has overwritten each since; nothing if nobody can."""


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch as the loader made it, and where its rows are."""

    batch: Any
    given: list[GivenIds]
    """The ids of each feature, table by table."""
    held: Held | None = None
    """What tells whether the loader has overwritten it since it was read."""


Plans = Generator[tuple[Plan, list[PlannedBatch]], None, None]
"""For each iteration its plan and its batches; what went wrong with the data comes after them."""


class PlanStream(Protocol):
    """Where plans come from, epoch after epoch: an oracle in this process, or in another one."""

    goes_on: bool
    """Whether another epoch may follow one that has ended: its plans go on, with the rows that are in the cache."""

    def epoch(self, traffic: Counters) -> Plans:
        """All plans of an epoch, for an oracle that may go by what the trainer counts in it. The loader is opened at
        once if it is read here: called in the loop's thread, while plans are made in another one."""
        ...

    def position(self, iterations: int) -> dict[str, Any]:
        """Where in the data training is after so many iterations of this epoch; plain values."""
        ...

    def resume(self, position: Mapping[str, Any]) -> None:
        """Begin where another run was; before the first epoch."""
        ...

    def stats(self) -> dict[str, Any]:
        """How long the data was waited for (`waited_s`) so far, and what else is known."""
        ...

    def interrupt(self) -> None:
        """End a wait for the next plan where that can be done: there will be no more."""
        ...

    def close(self) -> None:
        """Let go of everything, once the plans of the last epoch are closed."""
        ...


class Opened(NamedTuple):
    """Where plans come from, and what they are made for."""

    source: PlanStream
    capacity: Sequence[int]
    """Slots of each row width."""
    peers: Peers | None = None
    """None: there is one trainer."""


class Source:
    """Reads a loader, epoch after epoch, `accumulate` batches an iteration."""

    def __init__(self, loader: Iterable[Any], accumulate: int = 1, look_back: LookBack | None = None) -> None:
        """Looks at the first batch, and leaves the loader as it was."""
        self.tables: tuple[Table, ...] = ()
        """Whose ids are taken; set before the first plan."""
        self.epochs = Epochs(loader)
        self.reading, self._begun = Reading(()), False
        self._look_back, self._accumulate = look_back, accumulate
        self._loader = loader if isinstance(loader, Rereadable) else None
        self._kind = type(loader).__name__
        self.interrupted = False
        """Ends a scan early."""
        self._from: Mapping[str, Any] | None = None
        """Where the first epoch begins, if the run is one that was resumed."""
        self._error: Exception | None = None
        self._batches: Generator[tuple[int, Any], None, None] | None = None
        first = self.epochs.first()
        self.empty = not first
        """Whether the loader has no batch at all."""
        self.example = first[0] if first else None
        """Its first batch, until the first epoch begins: the loader may use its memory again."""
        self._first_ids: dict[str, Ids] = {}
        self.adapter = Adapter(self.example)

    @property
    def is_iterator(self) -> bool:
        """Whether the loader can be read once only."""
        return isinstance(self.epochs.loader, Iterator)

    @property
    def features(self) -> list[str]:
        """The features whose ids are taken, table by table."""
        return [name for table in self.tables for name in table.features]

    def first_ids(self) -> dict[str, Ids]:
        """The ids of the first batch."""
        if not self._first_ids and self.example is not None:
            found = self.adapter.extract(self.example, self.features, 0)
            self._first_ids = {name: ids.copy() for name, ids in found.items()}
        return self._first_ids

    def begin(self) -> None:
        """Open the loader for the next epoch; otherwise it is opened when its first plan is asked for."""
        self._begun = True
        self.first_ids()
        self.example, self._error, self.interrupted = None, None, False
        self.ahead = ReadAhead(self.epochs.loader)
        position, self._from = self._from, None
        batches = self.epochs.next(None if position is None else position.get("order"))
        self.reading = Reading(batches, self._look_back, position)

    def other_ids(self) -> Iterator[dict[str, Ids]]:
        """The ids of some batches all over the data, if the loader is known to give the same ones again."""
        if self._loader is None:
            return
        with suppress(BagpipeError):  # whatever is wrong with a batch is said when it is its turn
            for number, batch in self._loader.spread(NUM_OTHERS):
                yield self.adapter.extract(batch, self.features, number)

    def planned(self, oracle: AnyOracle, *, more: bool = False) -> Generator[tuple[Plan, Group], None, None]:
        """For each iteration its plan and its batches; what went wrong with the loader comes after them."""
        self.scan(oracle)
        yield from oracle.plans(self._groups(), more=more)
        if self._error is not None:
            raise self._error

    def scan(self, oracle: AnyOracle) -> None:
        """Count rows for a policy that wants to know how often each is used: those of batches spread over all data, or
        of all of them. One more reading, in stored order, and nothing is kept.

        A loader that is not known to give the same batches again shows what the oracle reads before the first plan;
        ConfigError if that is not enough.
        """
        count = oracle.to_count
        if count is not None:
            self.check_sample(count)
        if count is None or self._loader is None:
            return
        for number, batch in self._loader.spread(count):
            if self.interrupted:
                break
            ids = self.adapter.extract(batch, self.features, number)
            self._check(ids, number)
            oracle.count([ids[name] for name in self.features])

    def check_sample(self, count: int) -> None:
        """ConfigError if a policy wants to count all data (0) before the loader may have been read for good."""
        if count == 0 and self._loader is None:
            raise ConfigError(
                f"policy option sample is 0, for which all data is read twice, and the loader is a {self._kind}: "
                "give a bagpipe.data.Loader, or the number of batches to look at"
            )

    def close(self) -> None:
        """Let go of the loader, so that its worker processes can end."""
        if self._batches is not None:
            self._batches.close()
        self.reading.close()

    def position(self, iterations: int) -> dict[str, Any]:
        """Where in the data training is after so many iterations of this epoch; plain values."""
        return {"order": self.epochs.order} | self.reading.state(iterations * self._accumulate)

    def resume(self, position: Mapping[str, Any]) -> None:
        """Begin where another run was; an error if that can't be in this loader."""
        self.epochs.check(position)
        self._from = position

    def _groups(self) -> Iterator[tuple[list[Ids], Group]]:
        """For each iteration the ids of each feature, and the batches."""
        batches: list[tuple[Any, Held | None]] = []
        ids: list[list[Ids]] = []
        for batch, held, of_features in self._read():
            batches.append((batch, held))
            ids.append(of_features)
            if len(batches) == self._accumulate:
                yield _join(batches, ids)
                batches, ids = [], []
        if batches:
            yield _join(batches, ids)

    def _read(self) -> Iterator[tuple[Any, Held | None, list[Ids]]]:
        features = self.features
        for number, batch in self._numbered():
            try:
                ids = self.adapter.extract(batch, features, number)
                if self._accumulate > 1:
                    self._check(ids, number)
                    ids = {
                        name: part.copy() for name, part in ids.items()
                    }  # the loader is asked again before their use
                without = self.adapter.without(batch, features)
                held = self.ahead.hold(number, without)
            except Exception as error:
                self._error = error
                return
            yield without, held, list(ids.values())

    def _numbered(self) -> Iterator[tuple[int, Any]]:
        """All batches of an epoch; what goes wrong ends them, and is kept."""
        if not self._begun:
            self.begin()
        self._begun = False
        self._batches = iter(self.reading)
        if not self.empty:
            self.ahead.leave_out(self.adapter.paths[name] for name in self.features)
        try:
            self.ahead.pin()
            for numbered in self._batches:
                yield numbered
                self.ahead.pin()
        except Exception as error:
            self._error = error
        finally:
            self.ahead.unpin()

    def _check(self, ids: dict[str, Ids], number: int) -> None:
        """The oracle counts iterations; where one has several batches, it can't name the one that is wrong."""
        for table in self.tables:
            try:
                check_range(table, [ids[name] for name in table.features])
            except ValueRangeError as error:
                raise ValueRangeError(f"batch {number}: {error}") from None


class LocalPlans:
    """The plans of an oracle in this process."""

    def __init__(self, source: Source, oracle: AnyOracle, *, goes_on: bool = False) -> None:
        self._source, self._oracle, self.goes_on = source, oracle, goes_on

    def epoch(self, traffic: Counters) -> Plans:
        """All plans of an epoch."""
        self._oracle.measure(traffic)
        self._source.begin()
        return self._plans()

    def _plans(self) -> Plans:
        for plan, group in self._source.planned(self._oracle, more=self.goes_on):
            yield plan, planned_batches(plan, group, self._source.tables, self._source.adapter)

    def stats(self) -> dict[str, Any]:
        """How long the loader was waited for."""
        return {"waited_s": self._source.reading.seconds()}

    def position(self, iterations: int) -> dict[str, Any]:
        """Where in the data training is."""
        return self._source.position(iterations)

    def resume(self, position: Mapping[str, Any]) -> None:
        """Begin where another run was."""
        self._source.resume(position)

    def interrupt(self) -> None:
        """End a scan; a loader can't be interrupted otherwise: it is waited for."""
        self._source.interrupted = True

    def close(self) -> None:
        """Let go of the loader and of the oracle's threads."""
        self._source.close()
        self._oracle.close()


def planned_batches(plan: Plan, group: Group, tables: Sequence[Table], adapter: Adapter) -> list[PlannedBatch]:
    """The batches of an iteration with their ids again, in memory of their own."""
    features = [
        (name, number, plan.rows.of_table(number)[0]) for number, table in enumerate(tables) for name in table.features
    ]
    used = [0] * len(features)
    batches = []
    held = group.held or [None] * len(group.batches)
    for batch, lengths, own in zip(group.batches, group.lengths, held, strict=True):
        parts, values = [], {}
        for position, ((name, _, ids), length) in enumerate(zip(features, lengths, strict=True)):
            places = plan.inverse[position][used[position] : used[position] + length]
            parts.append(places)
            values[name] = torch.from_numpy(ids[places])
            used[position] += length
        given = adapter.replace(batch, values)
        found = [
            GivenIds(adapter.ids_in(given, name), places, number)
            for (name, number, _), places in zip(features, parts, strict=True)
        ]
        batches.append(PlannedBatch(given, found, own))
    return batches


def _join(batches: list[tuple[Any, Held | None]], ids: list[list[Ids]]) -> tuple[list[Ids], Group]:
    lengths = [tuple(len(part) for part in of_features) for of_features in ids]
    joined = ids[0] if len(ids) == 1 else [np.concatenate(parts) for parts in zip(*ids, strict=True)]
    return joined, Group([batch for batch, _ in batches], lengths, [held for _, held in batches])
