"""Bytes to be kept with a mark, put together from the pieces that messages carry; bounded (I5) and checked (I8)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from bagpipe.errors import StoreError, WireError
from bagpipe.wire.recovery_messages import Keep

BLOBS_MAX = 256
"""That are remembered, whole or not; the one that was begun first is given up for another."""


@dataclass(slots=True)
class _Blob:
    num_bytes: int
    crc32: int
    content: bytearray = field(default_factory=bytearray)
    is_kept: bool = False
    lock: Lock = field(default_factory=Lock)


class Pieces:
    """Blobs of which some pieces are here. A piece may come twice; each whole blob is kept once."""

    def __init__(self, blob_bytes_max: int, bytes_max: int) -> None:
        self._blob_bytes_max, self._bytes_max = blob_bytes_max, bytes_max
        self._blobs: dict[tuple[int, str], _Blob] = {}
        self._lock = Lock()

    def take(self, piece: Keep, content: memoryview, keep: Callable[[bytes], None]) -> int:
        """How many bytes of the blob are here now; with the last of them it was given to `keep`."""
        self._check(piece, len(content))
        with self._lock:
            blob = self._find(piece)
        if blob is None:
            return 0  # from the beginning, please
        with blob.lock:
            if blob.is_kept:
                return blob.num_bytes
            if piece.offset == len(blob.content):
                self._check_room(len(content))
                blob.content += content
            if len(blob.content) < blob.num_bytes:
                return len(blob.content)
            try:
                self._give(piece, blob, keep)
            except BaseException:
                with self._lock:
                    self._blobs.pop((piece.done, piece.name), None)
                raise
            return blob.num_bytes

    def clear(self) -> None:
        """Nothing is under way any more."""
        with self._lock:
            self._blobs.clear()

    def _give(self, piece: Keep, blob: _Blob, keep: Callable[[bytes], None]) -> None:
        if zlib.crc32(blob.content) != blob.crc32:
            raise WireError(f"{piece.name} of mark {piece.done} has another checksum than announced: send it anew")
        keep(bytes(blob.content))
        blob.is_kept, blob.content = True, bytearray()

    def _check(self, piece: Keep, num_bytes: int) -> None:
        if piece.num_bytes > self._blob_bytes_max:
            raise StoreError(
                f"{piece.name} of mark {piece.done} has {piece.num_bytes:,} B: a server keeps {self._blob_bytes_max:,} "
                "of one: keep less, or set recovery.restarts_max = 0 and go on from checkpoints"
            )
        if piece.offset + num_bytes > piece.num_bytes:
            raise WireError(
                f"a piece of {piece.name} ends at byte {piece.offset + num_bytes}: the whole has {piece.num_bytes}"
            )
        if not num_bytes and piece.num_bytes:
            raise WireError(f"a piece of {piece.name} without bytes: send some")

    def _find(self, piece: Keep) -> _Blob | None:
        """The blob of this piece, begun with the first one."""
        key = piece.done, piece.name
        known = self._blobs.get(key)
        if known is not None and (known.num_bytes, known.crc32) == (piece.num_bytes, piece.crc32):
            return known
        if piece.offset:
            return None
        self._blobs.pop(key, None)
        while len(self._blobs) >= BLOBS_MAX:
            del self._blobs[next(iter(self._blobs))]
        made = self._blobs[key] = _Blob(piece.num_bytes, piece.crc32)
        return made

    def _check_room(self, num_bytes: int) -> None:
        with self._lock:
            held = sum(len(blob.content) for blob in self._blobs.values())
        if held + num_bytes > self._bytes_max:
            raise StoreError(
                f"{held:,} B to be kept are under way, and {self._bytes_max:,} are allowed: send one after the other"
            )
