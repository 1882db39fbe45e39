"""Servers as whoever looks after a run sees them: what they can return to, and the order to do so, by message.

No trainer is needed for it, nor what trainers know of tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from bagpipe.checkpoint.point import ResumePoint
from bagpipe.errors import DeadlineError
from bagpipe.store.links import Asking, Link, Patience, Request, Session, exchange
from bagpipe.store.recovery_requests import MarksRequest, RecoverRequest
from bagpipe.wire.channel import Network
from bagpipe.wire.recovery_messages import Marks

_PAUSE_S = 0.05


def marks_of_servers(
    network: Network, addresses: Sequence[str], *, run: bytes, generation: int, patience: Patience | None = None
) -> list[Marks]:
    """The marks and checkpoints that each server knows of."""
    session = _session(network, addresses, run, generation, patience)
    requests = [MarksRequest() for _ in addresses]
    _ask(session, [[request] for request in requests])
    return [request.marks for request in requests]


def recover_servers(
    network: Network,
    addresses: Sequence[str],
    *,
    run: bytes,
    generation: int,
    point: ResumePoint,
    patience: Patience | None = None,
) -> None:
    """Begin a generation on all servers with the rows of that point.

    Returns when all are ready for trainers of that generation.
    """
    session = _session(network, addresses, run, generation, patience)
    requests = [RecoverRequest(point) for _ in addresses]
    last = network.now()
    while waiting := [request for request in requests if request.marks is None]:
        before = [request.progress for request in requests]
        _ask(session, [[request] if request.marks is None else [] for request in requests])
        if before != [request.progress for request in requests]:
            last = network.now()
        elif network.now() - last >= session.patience.deadline_s:
            behind = ", ".join(session.name(n) for n, request in enumerate(requests) if request in waiting)
            raise DeadlineError(
                f"no progress with {requests[0].what} for {network.now() - last:.0f} s at {behind}: see its log"
            )
        network.wait([], _PAUSE_S)


def _session(
    network: Network, addresses: Sequence[str], run: bytes, generation: int, patience: Patience | None
) -> Session:
    return Session(network, list(addresses), run, generation, 0, 1, [], False, patience or Patience())


def _ask(session: Session, requests: Sequence[Sequence[Request]]) -> None:
    with ExitStack() as stack:
        askings = []
        for server, of_server in enumerate(requests):
            link = Link(session, server)
            stack.callback(link.close)
            pending: Iterator[Request] = iter(of_server)
            askings.append(Asking(link, pending))
        exchange(session, askings)
    for asking in askings:
        if asking.failure is not None:
            raise asking.failure
