"""What a store asks of its servers so that nothing is lost: marks, checkpoints, recovery."""

from __future__ import annotations

from collections.abc import Callable

from bagpipe.checkpoint.point import ResumePoint
from bagpipe.store.links import Buffers, Link, Request
from bagpipe.store.requests import OrderedRequest, unexpected
from bagpipe.wire.messages import Body
from bagpipe.wire.recovery_messages import AskMarks, AskWork, Marks, Recover, Worked, Working


class Ordered(OrderedRequest):
    """Something that all servers do once."""

    def __init__(self, what: str, make: Callable[[int, int], Body]) -> None:
        """`make(trainer, sequence)` makes the record."""
        super().__init__()
        self.what, self._make = what, make

    def compose(self, link: Link) -> tuple[Body, Buffers]:
        """A few numbers and names."""
        return self._make(link.session.trainer, self.number(link)), ()


class WorkRequest(Request):
    """How far something is that takes long."""

    def __init__(self, what: str, sequence: int) -> None:
        self.what, self._body = what, AskWork(sequence)
        self.progress = -1
        self.result: bytes | None = None
        """Once it is done."""

    def compose(self, link: Link) -> tuple[Body, Buffers]:  # noqa: ARG002
        """Its number."""
        return self._body, ()

    def accept(self, link: Link, answer: Body, buffers: Buffers) -> None:  # noqa: ARG002
        """Done, or how far it is."""
        if isinstance(answer, Working):
            self.progress = answer.progress
        elif isinstance(answer, Worked) and len(buffers) == 1:
            self.result = bytes(buffers[0])
        else:
            raise unexpected(answer, "Worked")


class MarksRequest(Request):
    """Which marks and checkpoints a server knows of."""

    what = "its marks"
    needs_open = False
    marks: Marks

    def compose(self, link: Link) -> tuple[Body, Buffers]:  # noqa: ARG002
        """Nothing more to say."""
        return AskMarks(), ()

    def accept(self, link: Link, answer: Body, buffers: Buffers) -> None:  # noqa: ARG002
        """Its marks."""
        if not isinstance(answer, Marks):
            raise unexpected(answer, "Marks")
        self.marks = answer


class RecoverRequest(Request):
    """A generation begins."""

    needs_open = False

    def __init__(self, point: ResumePoint) -> None:
        self.what = f"its rows as they were at {point}"
        checkpoint = None if point.checkpoint is None else str(point.checkpoint.absolute())
        self._body = Recover(point.done, checkpoint, point.checksum)
        self.progress = -1
        self.marks: Marks | None = None
        """Once it is done."""

    def compose(self, link: Link) -> tuple[Body, Buffers]:  # noqa: ARG002
        """Where to go on from."""
        return self._body, ()

    def accept(self, link: Link, answer: Body, buffers: Buffers) -> None:  # noqa: ARG002
        """Done, or how far it is."""
        if isinstance(answer, Working):
            self.progress = answer.progress
        elif isinstance(answer, Marks):
            self.marks = answer
        else:
            raise unexpected(answer, "Marks")
