"""What a store asks of its servers so that nothing is lost: marks, what is kept with them, checkpoints."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

from bagpipe.errors import StoreError, WireError
from bagpipe.store.links import Buffers, Link, Request
from bagpipe.store.requests import OrderedRequest, unexpected
from bagpipe.wire.messages import Body
from bagpipe.wire.recovery_messages import (
    AskBlob,
    AskKept,
    AskMarks,
    AskWork,
    Blob,
    Keep,
    Keeping,
    Kept,
    KeptBlob,
    Marks,
    Recover,
    Worked,
    Working,
)

PIECE_BYTES_MAX = 8 << 20
"""Of what is kept, in one message: rows that are written meanwhile do not wait long behind it."""
BLOB_BYTES_MAX = 1 << 32
"""That a server may announce."""
_ANEW_MAX = 3


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
    """Which marks a server can return to."""

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

    def __init__(self, done: int | None, directory: str | None) -> None:
        self.what = "its rows as they were " + ("at first" if done is None else f"after {done:,} iterations")
        self._body = Recover(done, directory)
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


class KeepRequest(Request):
    """A piece of what is to be kept with a mark."""

    def __init__(self, body: Keep, piece: memoryview) -> None:
        self._body, self._piece = body, piece
        self.what = f"{body.name} to be kept"
        self.received = 0

    def compose(self, link: Link) -> tuple[Body, Buffers]:  # noqa: ARG002
        """The piece in a buffer."""
        return self._body, (self._piece,)

    def accept(self, link: Link, answer: Body, buffers: Buffers) -> None:  # noqa: ARG002
        """How much of it is there."""
        if not isinstance(answer, Keeping) or answer.received > self._body.num_bytes:
            raise unexpected(answer, "Keeping")
        self.received = answer.received


def keep_requests(done: int, name: str, blob: bytes, bytes_max: int) -> Iterator[KeepRequest]:
    """Piece after piece, as far as the server says that they have come; from the beginning if it has given them up."""
    view, sum_of_all, at_once = memoryview(blob), zlib.crc32(blob), min(PIECE_BYTES_MAX, bytes_max)
    offset, anew = 0, 0
    while True:
        body = Keep(done, name, len(blob), sum_of_all, offset)
        request = KeepRequest(body, view[offset : offset + at_once])
        yield request
        if request.received >= len(blob):
            return
        anew += request.received <= offset
        if anew > _ANEW_MAX:
            raise StoreError(f"{name} of mark {done} was given up by the server {anew} times: send fewer at once")
        offset = request.received


class KeptRequest(Request):
    """What is kept with a mark."""

    def __init__(self, done: int) -> None:
        self._body = AskKept(done)
        self.what = f"what is kept with mark {done}"
        self.blobs: list[KeptBlob] = []

    def compose(self, link: Link) -> tuple[Body, Buffers]:  # noqa: ARG002
        """Of which mark."""
        return self._body, ()

    def accept(self, link: Link, answer: Body, buffers: Buffers) -> None:  # noqa: ARG002
        """Their names."""
        if not isinstance(answer, Kept):
            raise unexpected(answer, "Kept")
        self.blobs = answer.blobs


class BlobRequest(Request):
    """A piece of what is kept."""

    def __init__(self, done: int, name: str, start: int, into: memoryview) -> None:
        self._body, self._into = AskBlob(done, name, start, len(into)), into
        self.what = f"{name} of mark {done}"

    def compose(self, link: Link) -> tuple[Body, Buffers]:  # noqa: ARG002
        """From where, and how much."""
        return self._body, ()

    def accept(self, link: Link, answer: Body, buffers: Buffers) -> None:  # noqa: ARG002
        """All of the piece."""
        if not isinstance(answer, Blob) or len(buffers) != 1:
            raise unexpected(answer, "Blob")
        if len(buffers[0]) != len(self._into):
            raise WireError(f"{len(buffers[0])} bytes of {self.what} came where {len(self._into)} were due")
        self._into[:] = buffers[0]


def blob_requests(
    done: int, blobs: Sequence[KeptBlob], into: dict[str, bytearray], bytes_max: int
) -> Iterator[Request]:
    """All pieces of all blobs, each into its own bytes; what has another checksum is refused."""
    for blob in blobs:
        if blob.num_bytes > BLOB_BYTES_MAX:
            raise WireError(f"{blob.name} of mark {done} has {blob.num_bytes:,} B: {BLOB_BYTES_MAX:,} are allowed")
        whole = into[blob.name] = bytearray(blob.num_bytes)
        for start in range(0, blob.num_bytes, bytes_max):
            yield BlobRequest(done, blob.name, start, memoryview(whole)[start : start + bytes_max])
        if zlib.crc32(whole) != blob.crc32:
            raise WireError(f"{blob.name} of mark {done} came with another checksum than announced: ask again")
