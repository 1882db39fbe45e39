"""Groups of trainers in processes of their own, over torch.distributed's gloo.

Each purpose has connections of its own. Nothing of torch.distributed's global state is used, so a script's own groups
stay as they are. A peer that ends, or does not answer until the deadline, is an error that names it, what was exchanged
and, if the peer could still say it, why (I7). Connections are neither encrypted nor authenticated: use a network that
only the trainers reach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from bagpipe.cluster.interface import LOOPBACK, find_address
from bagpipe.errors import ConfigError, PipelineError
from bagpipe.trainer.collective import Collective, memory_groups
from bagpipe.trainer.gloo_group import GlooGroup
from bagpipe.trainer.meeting import Meeting, MeetingPoint, listening_at, sentence
from bagpipe.trainer.stages import DEADLINE_S

PURPOSES = ("critical", "delayed", "dense")


class TrainerGroups:
    """The groups of one trainer, one for each purpose; made by `open_groups`."""

    def __init__(self, groups: Mapping[str, Collective], meetings: Sequence[Meeting | MeetingPoint] = ()) -> None:
        self.critical, self.delayed, self.dense = (groups[purpose] for purpose in PURPOSES)
        self._meetings = meetings

    def abort(self, reason: BaseException | str) -> None:
        """This trainer can't go on: all waits, of others and of other threads of this one, end with an error."""
        for group in (self.critical, self.delayed, self.dense):
            group.abort(reason)

    def close(self) -> None:
        """Let go of all connections, threads and ports. May be called twice, and after errors."""
        for group in (self.critical, self.delayed, self.dense):
            group.close()
        for meeting in self._meetings:
            meeting.close()

    def __enter__(self) -> TrainerGroups:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        self.close()


def open_groups(
    rank: int,
    size: int,
    meeting: MeetingPoint | str,
    *,
    interface: str = LOOPBACK,
    generation: int = 0,
    deadline_s: float = DEADLINE_S,
    given_up: Callable[[], str] = lambda: "",
) -> TrainerGroups:
    """Join the other trainers; returns when all `size` of them are there.

    `meeting` is the address (host:port) of trainer 0's meeting point; trainer 0 gives the point itself, or an address
    at which it shall listen. `interface` is the one that this trainer's connections use, by name or address. After a
    failure trainers may meet again at the same point, under another `generation`. `given_up` says why nobody is waited
    for any more, if so.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size} trainers: give a number from 0 to {size - 1}")
    if size == 1:
        return TrainerGroups({purpose: memory_groups(1)[0] for purpose in PURPOSES})
    host = find_address(interface)
    own = listening_at(meeting) if isinstance(meeting, str) and rank == 0 else None
    met: Meeting | None = None
    groups: dict[str, GlooGroup] = {}
    try:
        address = meeting if isinstance(meeting, str) else meeting.address
        met = Meeting(address, rank, size, f"trainers-{generation}", deadline_s, given_up)
        met.gather("joined", f"trainers = {size}")
        for purpose in PURPOSES:
            groups[purpose] = _connect(met, purpose, host, deadline_s)
        met.gather("connected", "")
    except BaseException:
        for group in groups.values():
            group.close()
        for each in (met, own):
            if each is not None:
                each.close()
        raise
    return TrainerGroups(groups, [each for each in (met, own) if each is not None])


def _connect(meeting: Meeting, purpose: str, host: str, deadline_s: float) -> GlooGroup:
    try:
        return GlooGroup(meeting, purpose, host, deadline_s)
    except RuntimeError as error:
        raise PipelineError(
            f"trainer {meeting.rank} can't connect to the others from {host}: {sentence(error)}: can they reach each "
            "other on this interface?"
        ) from error
