"""What a loader may be able to do beside giving its batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from bagpipe.types import Batch

State = Mapping[str, Any]


@runtime_checkable
class Positioned(Protocol):
    """A loader that can begin anywhere."""

    def __iter__(self) -> Iterator[Any]: ...

    def peek(self) -> Any:
        """A batch as they will come, or None if there is none; nothing is started or moved."""
        ...

    def state_dict(self, given: int | None = None) -> dict[str, Any]:
        """The position this many batches after the one it begins at, or before it."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Begin at a position; an error if it belongs to something else."""
        ...


class Rereadable(ABC):
    """A loader that is known to give the same batches again, each in memory of its own."""

    @abstractmethod
    def spread(self, count: int) -> Iterator[tuple[int, Batch]]:
        """So many of its batches with their numbers, in stored order and evenly spread over the data; all of them if
        `count` is 0 or there are not more."""
