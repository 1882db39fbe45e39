"""Trainer and two servers at the ends of a link of 100 Mbit/s: rows ahead of time against rows on the critical path
(`nocache`) and against no network at all (`ideal`), for Wide&Deep and DLRM.

Compute and network stand in the ratio of the paper's testbed. The link joins two network namespaces; where they can't
be made, `link` and `link_reason` say so, and the rate limiter of the simulated network stands in for it. All systems
train the same batches from the same values and take turns in one process. A turn lasts until its traffic has ended.
The servers hold every row that occurs, and the caches are warm, before the link is limited. `bytes_sent` and
`bytes_received` are an iteration's, of the trainer, counted on the link.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import msgspec
import numpy as np

from bagpipe.allocator import keep_freed_memory
from bagpipe.data import Dataset, Generated, find_preset
from bagpipe.errors import PipelineError
from bagpipe.layout import RowLayout
from bagpipe.optim import SGD
from bagpipe.server.client import RemoteStore
from bagpipe.server.process import Ready, ServerOptions
from bagpipe.server.server import EmbeddingServer
from bagpipe.store import Store
from bagpipe.types import Batch, Table
from bagpipe.wire.keys import VARIABLE, Security, find_keys, new_keys
from bagpipe.wire.stream import SocketNetwork
from benchmarks import Benchmark, Results
from benchmarks.children import child, end_with_parent, heard, say, tell
from benchmarks.namespaces import SERVERS, TRAINER, NamespaceError, Namespaces, counted_bytes, joined_namespaces
from benchmarks.overlap_server import ServerJob
from benchmarks.simulated import SimulatedConnection, SimulatedNetwork, SimulatedPeer
from benchmarks.train import CACHE_SHARE, Ours, Size, Work
from benchmarks.turns import Contestant, Link, take_turns

BITS_PER_SECOND = 100_000_000
NUM_SERVERS = 2
NAMESPACES, SIMULATED = "namespaces", "simulated"
PLAIN, KEYS = "plain", "keys"
OURS, OURS_WITH_KEYS, NOCACHE, IDEAL = "lookahead", "lookahead with keys", "nocache", "ideal"


@dataclass(frozen=True)
class System:
    """One way to train."""

    policy: str
    servers: str | None
    """How it talks to servers of its own: plainly or with keys; None if it has none."""
    share: float
    """Its part of the iterations of a turn."""


SYSTEMS = {
    OURS: System("lookahead", PLAIN, 1),
    OURS_WITH_KEYS: System("lookahead", KEYS, 1),
    NOCACHE: System("nocache", PLAIN, 0.25),
    IDEAL: System("ideal", None, 1),
}
MODELS = {"wide_deep": (OURS, OURS_WITH_KEYS, NOCACHE, IDEAL), "dlrm": (OURS, NOCACHE, IDEAL)}
FULL = Size(1.0, 48, 16_384, 288, {"wide_deep": 5, "dlrm": 4}, {"wide_deep": 8, "dlrm": 3})
QUICK = Size(0.001, 8, 256, 4, {"wide_deep": 2, "dlrm": 2}, {"wide_deep": 2, "dlrm": 2})


class Job(msgspec.Struct, frozen=True):
    """What the process that trains is told."""

    model: str
    quick: bool
    addresses: dict[str, list[str]]
    """Of the servers of each system."""


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the process that trains says: a rate that the link should have from now on (0: none), or its results."""

    limit: int = -1
    results: list[dict[str, Any]] = []


def run(quick: bool) -> Results:
    """Wide&Deep, then DLRM; about five minutes, and 12 GB."""
    with ExitStack() as stack:
        try:
            namespaces = stack.enter_context(joined_namespaces())
        except NamespaceError as error:
            link: dict[str, Any] = {"link": SIMULATED, "link_reason": str(error)}
            return [link | row for model in MODELS for row in simulated(model, quick)]
        link = {"link": NAMESPACES, "link_reason": None}
        return [link | row for model in MODELS for row in in_namespaces(namespaces, model, quick)]


def in_namespaces(namespaces: Namespaces, model: str, quick: bool) -> Results:
    """One model, servers and trainer in processes of their own, each on their side of the link."""
    server_keys, client_keys = new_keys()
    server, trains = ([sys.executable, "-m", f"benchmarks.{name}"] for name in ("overlap_server", "overlap"))
    with ExitStack() as stack:
        addresses: dict[str, list[str]] = {}
        for name in MODELS[model]:
            security = SYSTEMS[name].servers
            servers = []
            for number in range(NUM_SERVERS if security is not None else 0):
                process = stack.enter_context(
                    child(namespaces.command(SERVERS, server), {VARIABLE: server_keys.text()})
                )
                options = ServerOptions(
                    address=f"{namespaces.host(SERVERS)}:0", server=number, servers=NUM_SERVERS, parent=os.getpid()
                )
                say(process, ServerJob(options, security == KEYS))
                servers.append(process)
            addresses[name] = [msgspec.json.decode(heard(process), type=Ready).address for process in servers]
        trainer = stack.enter_context(child(namespaces.command(TRAINER, trains), {VARIABLE: client_keys.text()}))
        say(trainer, Job(model, quick, addresses))
        while not (line := msgspec.json.decode(heard(trainer), type=Line)).results:
            namespaces.limit(line.limit or None)
            say(trainer, Line(line.limit))
        return line.results


def simulated(model: str, quick: bool) -> Results:
    """One model, everything in this process. Nothing is encrypted there, so keys would cost nothing."""
    keep_freed_memory()
    link = SimulatedLink()
    try:
        return measure(model, [name for name in MODELS[model] if SYSTEMS[name].servers != KEYS], quick, link)
    finally:
        link.close()


class NamespaceLink:
    """The trainer's side of a link between namespaces, in a process that runs in one; its parent sets the rate."""

    def __init__(self, addresses: dict[str, list[str]]) -> None:
        self._addresses = addresses

    def open_store(self, name: str, layouts: Sequence[RowLayout]) -> Store:
        """The servers of a system; they are on the same host, but nothing may pass by the link."""
        security: Security = find_keys("client") if SYSTEMS[name].servers == KEYS else "none"
        network = SocketNetwork(security, local=False)
        return RemoteStore(layouts, self._addresses[name], network)

    def limit(self, bits_per_second: int | None) -> None:
        """Ask for a rate, and wait until it is set."""
        tell(Line(bits_per_second or 0))
        if not sys.stdin.buffer.readline():
            raise PipelineError("the process that started this one is gone")

    def counted(self) -> tuple[int, int]:
        """Bytes on the link, those of headers and acknowledgements included."""
        return counted_bytes()


class SimulatedLink(SimulatedNetwork):
    """A link in memory with servers in this process behind it."""

    def __init__(self) -> None:
        super().__init__(real_time=True)
        self._posted: dict[type, int] = {SimulatedConnection: 0, SimulatedPeer: 0}
        """Bytes, by the end that they go to."""
        self._servers: list[EmbeddingServer] = []

    def open_store(self, name: str, layouts: Sequence[RowLayout]) -> Store:
        """Servers of a system, made now."""
        addresses = [f"{name} {number}" for number in range(NUM_SERVERS)]
        for number, address in enumerate(addresses):
            server = EmbeddingServer(server=number, servers=NUM_SERVERS, waits=self.waits)
            self._servers.append(server)
            self.listen(address, server.handle)
        return RemoteStore(layouts, addresses, self)

    def limit(self, bits_per_second: int | None) -> None:
        """From now on each direction carries so much."""
        self._bytes_per_second = None if bits_per_second is None else bits_per_second / 8

    def counted(self) -> tuple[int, int]:
        """Bytes that the link has carried until now; of a long message, those that have passed already."""
        with self._changed:
            return self._passed(SimulatedPeer), self._passed(SimulatedConnection)

    def _passed(self, end: type) -> int:
        waits_s = max(0.0, self._link_free_at[end] - self.now())
        return self._posted[end] - round(waits_s * (self._bytes_per_second or 0))

    def post(self, end: SimulatedConnection | SimulatedPeer, letter: bytes) -> None:
        """Count what is sent on its way."""
        with self._changed:
            self._posted[type(end)] += len(letter)
        super().post(end, letter)

    def close(self) -> None:
        """Let the servers' rows go, too."""
        super().close()
        for server in self._servers:
            server.close()


@dataclass(frozen=True)
class CompactWork(Work):
    """Work whose tables have only the rows that occur, renumbered: the ideal's cache would hold the others, too."""

    tables: Sequence[Table] = ()


def enter(name: str, work: CompactWork, link: Link) -> Contestant:
    """A system that is ready for its turns."""
    system = SYSTEMS[name]
    served = system.servers is not None
    table_rows = sum(table.rows or 0 for table in work.data.tables)
    ours = Ours(
        work,
        system.policy,
        cache_rows=8 * work.size.batch_size if work.size is QUICK else round(CACHE_SHARE * table_rows),
        store=partial(link.open_store, name) if served else "memory",
        filled=served,  # a row that was never written would not travel
    )
    if system.policy != "nocache":
        ours.skip(work.size.batches)  # all of them once: caches are warm, and the next is again the first
    ours.train(1)
    return Contestant(ours, max(1, round(work.size.turn[work.model] * system.share)))


def measure(model: str, names: Sequence[str], quick: bool, link: Link) -> Results:
    """What the process that trains does: all systems of a model in turn."""
    work = _work(model, QUICK if quick else FULL)
    with ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        for name in names:
            contestants[name] = enter(name, work, link)
            stack.callback(contestants[name].ours.close)
        take_turns(list(contestants.values()), work.size.rounds[model], link, BITS_PER_SECOND)
        return [_described(work) | {"system": name} | _compared(name, contestants) for name in contestants]


def _described(work: CompactWork) -> dict[str, Any]:
    return {
        "model": work.model,
        "megabits_per_second": BITS_PER_SECOND / 1e6,
        "batch_size": work.size.batch_size,
        "dim": work.size.dim,
        "row_optimizer": SGD.name,
    }


def _compared(name: str, contestants: dict[str, Contestant]) -> dict[str, Any]:
    system, ideal = contestants[name], contestants[IDEAL]
    to_nocache = system.ratio_to(contestants[NOCACHE])
    losses = zip(system.ours.losses, ideal.ours.losses, strict=False)
    figures = _figures(system) | {
        "time_ratio_to_ideal": system.ratio_to(ideal),
        "time_ratio_to_nocache": to_nocache,
        "speedup_over_nocache": 1 / to_nocache,
        "loss_difference_max": max(math.fabs(a - b) for a, b in losses),
    }
    return figures | ({"time_ratio_to_no_keys": system.ratio_to(contestants[OURS])} if name == OURS_WITH_KEYS else {})


def _figures(system: Contestant) -> dict[str, Any]:
    """Of an iteration, and of all turns."""
    iterations = system.turn * len(system.seconds)
    return {
        "iteration_ms": 1e3 * statistics.median(system.seconds),
        "bytes_sent": int(system.moved[0]) // iterations,
        "bytes_received": int(system.moved[1]) // iterations,
        "fetched_rows": system.more("fetched_rows") / system.more("iterations"),
        "written_rows": system.more("written_rows") / system.more("iterations"),
        "stall_fraction": system.stall_fraction,
        "cache_rows": system.after["cache_rows"],
    }


def _work(model: str, size: Size) -> CompactWork:
    preset = find_preset("criteo-kaggle-like")
    whole = preset if size.rows_share == 1 else preset.scaled(size.rows_share)
    data = Generated(whole, size.batch_size * size.batches, 0)
    prepared = list(data.batches(size.batch_size))
    touched, compact = renumber(data, prepared)
    return CompactWork(model, size, data, lambda: cycle(prepared), touched, tables=compact)


def renumber(data: Dataset, prepared: Sequence[Batch]) -> tuple[dict[str, Any], list[Table]]:
    """Change the ids of batches so that tables have only rows that occur; those, and the tables."""
    touched: dict[str, Any] = {}
    compact = []
    for table in data.tables:
        values = [batch.sparse[name].values.numpy() for batch in prepared for name in table.features]
        occurs = np.zeros(table.rows or 0, np.bool_)
        for ids in values:
            occurs[ids] = True
        numbers = np.cumsum(occurs) - 1
        for ids in values:
            ids[:] = numbers[ids]
        num_rows = int(np.count_nonzero(occurs))
        touched[table.name] = np.arange(num_rows)
        compact.append(replace(table, rows=num_rows))
    return touched, compact


def _train() -> None:
    end_with_parent()
    keep_freed_memory()
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    tell(Line(results=measure(job.model, list(job.addresses), job.quick, NamespaceLink(job.addresses))))


BENCHMARK = Benchmark(
    "overlap", "rows over a link of 100 Mbit/s: ahead of time, on the critical path, or not at all", run
)

if __name__ == "__main__":
    _train()
