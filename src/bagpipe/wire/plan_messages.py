"""What data processors, the oracle and trainers say to each other.

A batch or a plan travels in the buffers of its message: the body that `bagpipe.wire.codec` packs it to, then its
arrays. All requests may be asked again: the answer is the same.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from bagpipe.wire.records import Count, Iteration, Positive, Record, Value

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
Slots: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Fingerprint: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]


class GetBatch(Record, frozen=True):
    """A batch, please."""

    number: Count
    order: Fingerprint
    """Of data and order, so that batches of others are not taken for it."""


class GotBatch(Record, frozen=True):
    """Here it is: a `SentBatch` of `bagpipe.data.samples`."""

    number: Count


class PlannedTable(Value, frozen=True):
    """A table as the oracle knows it."""

    name: Name
    rows: Positive | None
    features: list[Name]
    width: Positive
    """Floats of a row, its optimizer state included."""


class DescribePlans(Record, frozen=True):
    """What will the plans be like?"""

    trainer: Count


class DividedBy(Value, frozen=True):
    """How the samples and rows of a plan are divided among several trainers."""

    trainers: Annotated[int, msgspec.Meta(ge=2, le=64)]
    assign: Name
    design: Literal["owned", "partitioned", "replicated", "lrpp"]
    delayed: bool
    moving: bool
    """Whether rows may change their owners, in the design owned."""


class PlansDescribed(Record, frozen=True):
    """What a trainer needs to know before the first one."""

    tables: list[PlannedTable]
    capacity: list[Slots]
    """Slots of each row width, the widest first."""
    lookahead: Positive | Literal["auto"]
    policy: Name
    accumulate: Positive
    """Batches an iteration, at most."""
    fingerprint: Fingerprint
    """Of all this; plans have it too, so that those of other settings are not taken for them."""
    division: DividedBy | None = None
    """None: plans are for one trainer, and whole."""


class NextPlan(Record, frozen=True):
    """The plan of an iteration, please."""

    trainer: Count
    iteration: Count
    received: Iteration
    """All plans up to this one have arrived, and won't be asked for again."""


class Planned(Record, frozen=True):
    """The plan of an iteration with its batches: a `SentPlan` or `SentPart` of `bagpipe.oracle.sent_plan`."""

    iteration: Count
    fingerprint: Fingerprint


class NoMorePlans(Record, frozen=True):
    """The data has ended."""

    iterations: Count
    """How many plans there were."""


PlanBody: TypeAlias = GetBatch | GotBatch | DescribePlans | PlansDescribed | NextPlan | Planned | NoMorePlans
