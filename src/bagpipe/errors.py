"""Every error that Bagpipe raises on purpose, in one tree.

Each message says what is wrong, where, which value it has, and what to do (promise I8). Nothing has changed when one of
these is raised: a file that was being written is gone, a cache that was being trained is written back.
Programs decide by types and fields, which reach other processes as they are; messages are for people.

    BagpipeError
    ├── ConfigError         a setting is unknown, out of range, or contradicts another
    ├── DataError           input data can't be used
    │   ├── ShardError      a shard or manifest is missing, corrupt, truncated or of another version
    │   ├── ValueRangeError a feature, id or label has a value that training can't take
    │   └── BatchError      a batch from a loader does not have the shape that was announced, or was overwritten
    ├── ModelError          a model can't be trained exactly as it is
    ├── CapacityError       the cache can't hold what one iteration needs
    ├── GradientError       a gradient is not finite
    ├── StoreError          rows can't be read or written where they live
    ├── CheckpointError     a checkpoint is missing, damaged, of another version or model, or can't be written
    ├── WireError           bytes or a peer that can't be trusted: malformed, too long, of another version, run or key
    │   └── GenerationOverError  the run has gone on without who did this; names its generation
    ├── ClusterError        a part of a run on a cluster can't be started, or was lost; names it and the reason
    ├── ConsistencyError    the checker found a stale, lost or doubled value: a defect of Bagpipe, please report it
    ├── PipelineError       a background thread of the pipeline failed; its cause is attached
    │   └── PeerLostError   the connection to another trainer broke; names its rank
    ├── DeadlineError       a wait took longer than its deadline; names what it waited for
    └── MissingExtraError   an optional dependency is not installed; names the extra
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class BagpipeError(Exception):
    """Root of all errors that Bagpipe raises on purpose."""

    role: str | None = None
    """In the driver of a launch: the role that raised it or was lost, such as "trainer 1"; None everywhere else."""

    @property
    def fields(self) -> dict[str, int]:
        """What it says beside its type and its message."""
        return {}


class ConfigError(BagpipeError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class DataError(BagpipeError):
    """Input data can't be used."""


class ShardError(DataError):
    """A shard or manifest is missing, corrupt, truncated or of another version."""


class ValueRangeError(DataError, ValueError):
    """A feature, id or label has a value that training can't take."""


class BatchError(DataError, ValueError):
    """A batch from a loader does not have the shape that was announced, or the loader has overwritten it."""


class ModelError(BagpipeError, ValueError):
    """A model can't be trained exactly as it is."""


class CapacityError(BagpipeError, ValueError):
    """The cache can't hold what one iteration needs."""


class GradientError(BagpipeError, ArithmeticError):
    """A gradient is not finite."""


class StoreError(BagpipeError, OSError):
    """Rows can't be read or written where they live."""


class CheckpointError(BagpipeError):
    """A checkpoint is missing, damaged, of another version or model, or can't be written."""


class WireError(BagpipeError):
    """Bytes or a peer that can't be trusted: malformed, too long, of another version, run or key."""


class GenerationOverError(WireError):
    """The run has gone on without who did this: it was thought to be lost, or others were and all begin anew."""

    def __init__(self, message: str, generation: int) -> None:
        super().__init__(message, generation)
        self.generation = generation
        """The one that is over."""

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def fields(self) -> dict[str, int]:
        """Its generation."""
        return {"generation": self.generation}


class ClusterError(BagpipeError):
    """A part of a run on a cluster can't be started, or was lost; the message names it and the reason."""


class ConsistencyError(BagpipeError):
    """The checker found a stale, lost or doubled value."""


class PipelineError(BagpipeError):
    """A background thread of the pipeline failed; its cause is attached."""


class PeerLostError(PipelineError):
    """The connection to another trainer broke: it has died, or the network between the two has failed."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank
        """Which trainer it was to."""

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def fields(self) -> dict[str, int]:
        """Its rank."""
        return {"rank": self.rank}


class DeadlineError(BagpipeError, TimeoutError):
    """A wait took longer than its deadline; the message names what it waited for."""


class MissingExtraError(BagpipeError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


ErrorT = TypeVar("ErrorT", bound=BagpipeError)


def again(error: ErrorT, message: str) -> ErrorT:
    """The same error in other words."""
    kind: Any = type(error)
    return kind(message, **error.fields)  # type: ignore[no-any-return]


def named_error(
    kind: str, message: str, fields: Mapping[str, int], otherwise: type[BagpipeError] = PipelineError
) -> BagpipeError:
    """The error that another process reports, as the type that it names; `otherwise` where that is none of ours."""
    found: Any = globals().get(kind)
    if isinstance(found, type) and issubclass(found, BagpipeError):
        with suppress(TypeError):  # without its fields, or with others
            return found(message, **fields)
    return otherwise(message)
