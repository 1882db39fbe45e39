"""Servers as whoever looks after a run sees them: what they can return to, and the order to do so, by message.

No trainer is needed for it, nor what trainers know of tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bagpipe.checkpoint.point import ResumePoint
from bagpipe.store.links import Link, Patience, Question, Session, ask, ask_until_done, raise_first
from bagpipe.wire.channel import Network
from bagpipe.wire.recovery_messages import AskMarks, Marks, Recover, Working


def marks_of_servers(
    network: Network, addresses: Sequence[str], *, run: bytes, generation: int, patience: Patience | None = None
) -> list[Marks]:
    """The marks and checkpoints that each server knows of."""
    session = _session(network, addresses, run, generation, patience)
    questions = [Question("its marks", AskMarks(), Marks, needs_open=False) for _ in addresses]
    with _linked(session) as links:
        raise_first(ask(session, links, [iter([each]) for each in questions]))
    return [each.answer for each in questions]


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
    checkpoint = None if point.checkpoint is None else str(point.checkpoint.absolute())
    what, body = f"its rows as they were at {point}", Recover(point.done, checkpoint, point.checksum)
    questions = [Question[Working | Marks](what, body, Working, Marks, needs_open=False) for _ in addresses]
    with _linked(session) as links:
        ask_until_done(session, questions, lambda requests: ask(session, links, requests))


def _session(
    network: Network, addresses: Sequence[str], run: bytes, generation: int, patience: Patience | None
) -> Session:
    return Session(network, list(addresses), run, generation, 0, 1, [], False, patience or Patience())


@contextmanager
def _linked(session: Session) -> Iterator[list[Link]]:
    links = [Link(session, server) for server in range(len(session.addresses))]
    try:
        yield links
    finally:
        for link in links:
            link.close()
