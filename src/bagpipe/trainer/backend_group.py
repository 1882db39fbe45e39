"""One end of a group of trainers over torch.distributed: what gloo and NCCL have in common.

A group is usable until its first failure, which says what was exchanged with whom, and why it failed as far as anybody
could say; then all who wait in it are let go (I7).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from bagpipe.errors import BagpipeError, DeadlineError, PipelineError
from bagpipe.trainer.meeting import Meeting, describe, sentence


class BackendGroup(ABC):
    """One end of a group, usable until its first failure."""

    def __init__(self, group: Any, meeting: Meeting, purpose: str, deadline_s: float) -> None:
        self.rank, self.size, self.purpose, self.deadline_s = meeting.rank, meeting.size, purpose, deadline_s
        self.backend: Any = group
        self._meeting = meeting
        self._failure: BagpipeError | None = None
        self._under_way: dict[int, object] = {}
        self.others = [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def abort(self, reason: BaseException | str) -> None:
        """As the protocol; what was not yet received is lost."""
        if self._failure is None:
            self._meeting.tell(reason)
            self._failure = PipelineError(
                f"trainer {self.rank} left its group for {self.purpose} exchanges: {describe(reason)}"
            )
            self.disconnect()

    @property
    def usable(self) -> bool:
        """Whether nothing has failed, and it is open."""
        return self._failure is None

    @property
    def busy(self) -> bool:
        """Whether exchanges are under way."""
        return bool(self._under_way)

    def close(self) -> None:
        """As the protocol."""
        if self.busy:
            self.abort("it has closed the group")
        if self._failure is None:
            self._failure = PipelineError(f"trainer {self.rank} has closed its group for {self.purpose} exchanges")
        self._under_way.clear()
        self.backend = None

    def hold(self, transfer: object) -> None:
        """Keep what is under way: its memory may be written to until it was waited for, or the connections are gone."""
        self._under_way[id(transfer)] = transfer

    def release(self, transfer: object) -> None:
        """It was waited for, or has failed."""
        self._under_way.pop(id(transfer), None)

    def check(self, what: str) -> None:
        """Refuse to begin anything after a failure."""
        if self._failure is not None:
            raise PipelineError(f"{what} can't be exchanged: {self._failure}") from self._failure

    def fail(self, what: str, error: BaseException, waited_s: float) -> BagpipeError:
        """The error to raise for a failed exchange; everyone who waits for this trainer is let go."""
        if self._failure is not None:  # another thread's, or an abort: it came first
            return PipelineError(f"{what} can't be exchanged: {self._failure}")
        if waited_s >= self.deadline_s or "Timed out" in str(error):
            self._failure = DeadlineError(
                f"trainer {self.rank} waited {self.deadline_s:g} s for {what}: is it stuck, or has it skipped this "
                "exchange?"
            )
            self._meeting.tell(self._failure)
        else:
            reasons = self._meeting.reasons()
            told = "; ".join(f"trainer {rank} has stopped: {reason}" for rank, reason in reasons.items())
            cause = told or f"{sentence(error)}: see what that trainer reports"
            self._failure = PipelineError(f"trainer {self.rank} can't exchange {what}: {cause}")
            if not told:
                self._meeting.tell(f"it lost the connection for {what}")
        self.disconnect()
        return self._failure

    @abstractmethod
    def disconnect(self) -> None:
        """End the waits of all threads and peers."""
