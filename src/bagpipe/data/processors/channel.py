"""Short messages between a data processor and its consumer: JSON behind its length, over a pair of sockets.

The end of either process is the end of the other's stream, so nothing waits for the dead (I7).
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

from bagpipe.errors import DeadlineError, PipelineError

Message = dict[str, Any]

LENGTH = struct.Struct("<I")
BYTES_MAX = 1 << 28
"""A message is a few kilobytes; more than this is not one of ours."""


class Channel:
    """One end of the pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Message) -> bool:
        """Send a message; False if the other process is gone."""
        body = json.dumps(message).encode()
        try:
            self._socket.sendall(LENGTH.pack(len(body)) + body)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self, deadline_s: float | None = None) -> Message | None:
        """The next message; None if the other process is gone. DeadlineError after so many seconds without one."""
        until = None if deadline_s is None else time.monotonic() + deadline_s
        head = self._read(LENGTH.size, until)
        if head is None:
            return None
        (length,) = LENGTH.unpack(head)
        if length > BYTES_MAX:
            raise PipelineError(f"a data processor announced a message of {length} bytes: it is damaged")
        body = self._read(length, until)
        if body is None:
            return None
        message = json.loads(body)
        assert isinstance(message, dict)
        return message

    def close(self) -> None:
        """End the stream of the other process."""
        self._socket.close()

    def _read(self, length: int, until: float | None) -> bytes | None:
        pieces = bytearray()
        while len(pieces) < length:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise DeadlineError("no message in time")
            self._socket.settimeout(left)
            try:
                piece = self._socket.recv(length - len(pieces))
            except ConnectionResetError:
                return None
            except TimeoutError:
                continue
            finally:
                self._socket.settimeout(None)
            if not piece:
                return None  # in the middle of a message too: what a dead process has not finished does not count
            pieces += piece
        return bytes(pieces)
