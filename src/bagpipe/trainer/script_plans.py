"""The plans of a user's script on several trainers: the first one makes them from its loader, and serves the others.

Each trainer is given its part of a plan and its part of the batches, whatever their shape (`bagpipe.data.tree_wire`).
The first one takes its own parts as they are made, so that nothing of them is copied or sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from bagpipe.adapt import Adapter
from bagpipe.data.tree_wire import Trees, Types, pack_trees, types_in, unpack_trees
from bagpipe.errors import BagpipeError, BatchError, PipelineError, WireError
from bagpipe.oracle.assign import Assigner
from bagpipe.oracle.oracles import AnyOracle
from bagpipe.oracle.outbox import DESCRIPTION, Answer, Outbox
from bagpipe.oracle.partition import Partition
from bagpipe.oracle.plan import BatchSize, Plan
from bagpipe.oracle.sent_plan import pack_part, unpack_part
from bagpipe.oracle.service import ROOM
from bagpipe.split import Splitter
from bagpipe.trainer.divided import Divided, Part
from bagpipe.trainer.pipeline import Counters
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.trainer.source import Group, Plans, planned_batches
from bagpipe.wire.connection import Listen, Network, Peer
from bagpipe.wire.limits import LIMITS
from bagpipe.wire.messages import Failed, Message
from bagpipe.wire.plan_messages import DescribePlans, NextPlan, NoMorePlans, Planned, PlansDescribed

LEFT = Failed(PipelineError.__name__, "trainer 0 has left the training loop: let all leave it at the same iteration")


class SharedLoader(Divided):
    """Reads the loader of the first trainer, whose batches all share."""

    def __init__(self, loader: Iterable[Any], accumulate: int) -> None:
        super().__init__(loader, self._parts, accumulate, self._first_needed)
        self._splitter: Splitter | None = None
        self._assigner: Assigner | None = None
        self.types: Types = {}
        """What batches are made of."""

    def share(self, ending: Collection[str], assigner: Assigner) -> None:
        """How it is divided, before the first batch; BatchError if that one can't be divided or sent.

        Offsets of the features in `ending` end with the number of ids.
        """
        self._splitter, self._assigner = Splitter(self.adapter, self.features, ending), assigner
        if self.example is not None:
            self.types = types_in(self.example)
            part, _ = self._splitter.divide(self.example, 0, Assigner("contiguous", assigner.trainers))[-1]
            self.pack([self.adapter.without(part, self.features)], 0)

    def pack(self, batches: list[Any], number: int) -> Trees:
        """Batches as they travel, without their ids; BatchError if they are too large."""
        packed = pack_trees(batches, [self.adapter.paths[name] for name in self.features], self.types, number)
        if packed.num_bytes > LIMITS.buffer_bytes:
            raise BatchError(
                f"batch {number}: one trainer's part takes {packed.num_bytes / 1e6:.0f} MB besides its ids, and "
                f"{LIMITS.buffer_bytes / 1e6:.0f} MB can be sent at once: make batches smaller, or use more trainers"
            )
        return packed

    def _first_needed(self, number: int) -> int:
        assert self._assigner is not None, "share comes first"
        return self._assigner.first_needed(number)

    def _parts(self, batch: Any) -> Sequence[tuple[Any, int]]:
        assert self._splitter is not None, "share comes first"
        assert self._assigner is not None
        return self._splitter.divide(batch, self.reading.num_read - 1, self._assigner)


class ServedPlans:
    """The plans of the first trainer, a `PlanStream`, which the others are served theirs by."""

    goes_on = False

    def __init__(
        self,
        listen: Listen,
        source: SharedLoader,
        oracle: AnyOracle,
        partition: Partition,
        described: PlansDescribed,
        *,
        run: bytes,
        room: int = ROOM,
        compress: bool = False,
    ) -> None:
        """Up to `room` plans are made beyond those that all other trainers have asked for.

        `compress` them where those are on other machines.
        """
        self._source, self._oracle, self._partition, self._run = source, oracle, partition, run
        self._fingerprint, self._compress = described.fingerprint, compress
        self._outbox = Outbox(partition.trainers - 1, room)
        self._outbox.describe(Answer(described))
        self._end: Answer | None = None
        self._interrupted = False
        self._listening = listen(self.handle)
        self.address = self._listening.address
        """Where others ask for their plans."""
        self.capacity = list(described.capacity)
        """Slots of each row width, on every trainer."""

    def epoch(self, traffic: Counters) -> Plans:
        """All plans; the parts of others are laid out for them as each is made. What this trainer counts goes for
        all."""
        self._oracle.measure(traffic)
        self._source.begin()
        return self._plans()

    def _plans(self) -> Plans:
        source, num_plans = self._source, 0
        try:
            for division, parts in source.divided(self._oracle, self._partition):
                samples = list(zip(*(part.samples for part in parts), strict=True))
                plans = [division.part(rank, *samples) for rank in range(len(parts))]
                answers = [self._packed(plan, part) for plan, part in zip(plans[1:], parts[1:], strict=True)]
                if not self._outbox.put(plans[0].iteration, answers):
                    return
                num_plans += 1
                yield plans[0], planned_batches(plans[0], parts[0].group, source.tables, source.adapter)
            self._finish(Answer(NoMorePlans(num_plans)))
        except BagpipeError as error:
            self._finish(Answer(Failed.of(error)))
            raise
        except Exception as error:
            self._finish(Answer(Failed(PipelineError.__name__, f"its loader failed: {type(error).__name__}: {error}")))
            raise

    def handle(self, peer: Peer, message: Message) -> None:
        """Answer another trainer, once its plan is there."""
        body = message.body
        if message.run != self._run:
            raise WireError("a message of another run: check the addresses")
        peer.admit()
        if not isinstance(body, DescribePlans | NextPlan):
            raise WireError(f"trainer 0 was sent {type(body).__name__}: it gives plans only")
        if not 1 <= body.trainer < self._partition.trainers:
            raise WireError(
                f"trainer {body.trainer} asks trainer 0 for plans: 1 to {self._partition.trainers - 1} may do that"
            )
        if self._interrupted and self._end is not None:
            peer.reply(self._end.body)
        elif isinstance(body, NextPlan):
            self._outbox.answer(peer, body.trainer - 1, body.iteration, body.received)
        else:
            self._outbox.answer(peer, body.trainer - 1, DESCRIPTION, DESCRIPTION)

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
        """This trainer needs no more plans; who still asks for one is told so. The loader itself is waited for."""
        self._finish(Answer(LEFT))
        self._interrupted = True
        self._outbox.close()

    def close(self) -> None:
        """Answer nobody any more, and let go of the loader and of the oracle's threads."""
        self._listening.close()
        self._source.close()
        self._oracle.close()

    def _finish(self, end: Answer) -> None:
        if self._end is None:
            self._end = end
            self._outbox.finish(end)

    def _packed(self, plan: Plan, part: Part) -> Answer:
        """One trainer's part, as it is sent."""
        group = part.group
        first = max(0, self._source.reading.num_read - len(group.batches))
        sizes = [
            BatchSize(first + number, count, tuple(lengths))
            for number, (count, lengths) in enumerate(zip(part.samples, group.lengths, strict=True))
        ]
        trees = self._source.pack(group.batches, first)
        return Answer(*pack_part(plan, sizes, trees, self._fingerprint, compress=self._compress))


class ScriptPlans(RemotePlans):
    """The plans of another trainer of the script, as the first one serves them."""

    def __init__(
        self,
        network: Network,
        address: str,
        adapter: Adapter,
        types: Types,
        *,
        run: bytes,
        trainer: int,
    ) -> None:
        """`adapter` and `types` are those of a batch of this trainer's own loader."""
        super().__init__(network, address, run=run, trainer=trainer)
        self._name = "trainer 0"
        self._adapter, self._types = adapter, types

    def resume(self, position: Mapping[str, Any]) -> None:
        """The first trainer does it for all."""

    def _read(self, body: Planned, buffers: Sequence[memoryview], iteration: int) -> tuple[Plan, Group]:
        name = f"the plan of iteration {iteration}"
        sent = unpack_part(body, buffers, self._shape, iteration)
        sizes, batches = sent.sizes, unpack_trees(sent.batches, self._types)
        if len(batches) != len(sizes):
            raise WireError(f"{name} is for {len(sizes)} batches, and {len(batches)} came")
        lengths = [self._num_ids(batch, size, name) for batch, size in zip(batches, sizes, strict=True)]
        return sent.plan, Group(batches, lengths)

    def _num_ids(self, batch: Any, size: BatchSize, name: str) -> tuple[int, ...]:
        """How many ids of each feature a batch has room for; as many as the plan has."""
        assert self._adapter is not None
        names = [feature for feature, _ in self._shape.features]
        try:
            found = tuple(map(len, self._adapter.extract(batch, names, size.number).values()))
        except BatchError as error:
            raise WireError(f"{name}: {error}") from error
        if found != size.num_ids:
            raise WireError(f"{name} has {list(size.num_ids[:8])} ids, its batch {list(found[:8])}")
        return found
