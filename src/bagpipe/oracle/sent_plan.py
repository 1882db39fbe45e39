"""A plan with its batches as it travels, and as it is checked before anything is done with it (I8).

The ids of its features do not travel: what stands for them is in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from bagpipe.data.samples import SentBatch
from bagpipe.data.tree_wire import Trees
from bagpipe.errors import WireError
from bagpipe.oracle.plan import BatchSize, Plan
from bagpipe.oracle.plan_shape import PlanShape
from bagpipe.types import Batch
from bagpipe.wire.codec import pack, unpack
from bagpipe.wire.plan_messages import Planned

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SentPlan:
    """The plan of an iteration, or one trainer's part of it, and its batches."""

    plan: Plan
    batches: tuple[SentBatch, ...]


@dataclass(frozen=True, slots=True)
class SentPart:
    """The same where batches are of any shape."""

    plan: Plan
    sizes: tuple[BatchSize, ...]
    batches: Trees


def pack_plan(
    plan: Plan, batches: Sequence[Batch], features: Sequence[str], fingerprint: str = "", *, compress: bool = False
) -> tuple[Planned, list[memoryview]]:
    """A plan, or one trainer's part of it, and its batches, whose ids of these features are in the plan."""
    sent = SentPlan(_sent(plan), tuple(SentBatch.of(batch, features) for batch in batches))
    body, buffers = pack(sent, compress=compress)
    return Planned(plan.iteration, fingerprint), [memoryview(body), *buffers]


def unpack_plan(
    record: Planned, buffers: Sequence[memoryview], shape: PlanShape, iteration: int
) -> tuple[Plan, list[Batch]]:
    """The plan of this iteration and its batches; WireError if anything about it can't be."""
    sent = _unpack(record, buffers, SentPlan, shape, iteration)
    features = [name for name, _ in shape.features]
    batches = [batch.batch(features) for batch in sent.batches]
    sizes = [
        BatchSize(batch.number, len(batch), tuple(batch.sparse[name].values.numel() for name in features))
        for batch in batches
    ]
    sent.plan.check(shape, iteration, sizes)
    return sent.plan, batches


def pack_part(
    plan: Plan, sizes: Sequence[BatchSize], batches: Trees, fingerprint: str, *, compress: bool = False
) -> tuple[Planned, list[memoryview]]:
    """The same for batches of any shape."""
    body, buffers = pack(SentPart(_sent(plan), tuple(sizes), batches), compress=compress)
    return Planned(plan.iteration, fingerprint), [memoryview(body), *buffers]


def unpack_part(record: Planned, buffers: Sequence[memoryview], shape: PlanShape, iteration: int) -> SentPart:
    """The plan of this iteration and the sizes of its batches, checked; batches are still as they came."""
    sent = _unpack(record, buffers, SentPart, shape, iteration)
    sent.plan.check(shape, iteration, sent.sizes)
    return sent


def _sent(plan: Plan) -> Plan:
    """What trainers are told of a plan."""
    return replace(plan, sharing=None, guests=()) if plan.sharing is not None or plan.guests else plan


def _unpack(record: Planned, buffers: Sequence[memoryview], kind: type[T], shape: PlanShape, iteration: int) -> T:
    name = f"the plan of iteration {iteration}"
    if record.iteration != iteration:
        raise WireError(f"the plan of iteration {record.iteration} came where {iteration} was due")
    if record.fingerprint != shape.fingerprint:
        raise WireError(
            f"{name} is for settings {record.fingerprint}, and those before it were for {shape.fingerprint}: "
            "the oracle was started again with others, start the run again"
        )
    if not buffers:
        raise WireError(f"{name} has no buffers: it needs at least 1")
    return unpack(buffers[0], buffers[1:], kind, name)
