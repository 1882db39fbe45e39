"""What data processors, the oracle and trainers say to each other; arrays travel beside it as raw buffers.

A message with a batch or a plan has three buffers, one a type of number: float32, int32, int64. Which array lies where
follows from the record (`bagpipe.data.batch_wire`, `bagpipe.oracle.plan_wire`). All requests may be asked again: the
answer is the same.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from bagpipe.wire.records import Count, Iteration, Positive, Record, Value

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Slots: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Fingerprint: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]


class FeatureHead(Value, frozen=True):
    """The ids of one feature in one batch."""

    name: Name
    width: Size | None
    """Ids a sample; None: bags of any number, with offsets."""
    num_ids: Size
    bits: Literal[0, 32, 64]
    """Of each id; 0: they do not travel, the plan has what stands for them."""
    weighted: bool


class BatchHead(Value, frozen=True):
    """A batch, but for its numbers."""

    number: Count
    num_samples: Size
    num_dense: Size
    features: list[FeatureHead]


class GetBatch(Record, frozen=True):
    """A batch, please."""

    number: Count
    order: Fingerprint
    """Of data and order, so that batches of others are not taken for it."""


class GotBatch(Record, frozen=True):
    """Here it is."""

    head: BatchHead


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
    """The plan of an iteration, and its batches without the ids."""

    iteration: Count
    fingerprint: Fingerprint
    lookahead: Positive
    hits: Count
    evict_after: Iteration
    num_rows: Size
    """Of the batches; then those of the lists of rows that move."""
    num_fetch: Size
    num_evict: Size
    num_victims: Size
    capacity: list[Positive]
    """The slots of each row width from here on; empty: as before."""
    batches: list[BatchHead]


class SyncHead(Value, frozen=True):
    """What one trainer exchanges with the others, but for the lists (`bagpipe.oracle.sync_wire`)."""

    rank: Count
    samples: Annotated[list[list[Size]], msgspec.Meta(max_length=1 << 16)]
    """Of each batch those of each trainer."""
    fetched_after: Iteration
    """Whose evictions must have left before vectors are received; then the same of the other vectors."""
    values_after: Iteration
    later_after: Iteration
    sizes: Annotated[list[Size], msgspec.Meta(min_length=20, max_length=20)]
    """Entries of each list, of all trainers and tables."""


class PlannedPart(Record, frozen=True):
    """One trainer's part of a plan: as a plan, and what it exchanges with the others."""

    plan: Planned
    sync: SyncHead


class NoMorePlans(Record, frozen=True):
    """The data has ended."""

    iterations: Count
    """How many plans there were."""


PlanBody: TypeAlias = (
    GetBatch | GotBatch | DescribePlans | PlansDescribed | NextPlan | Planned | NoMorePlans | PlannedPart
)
