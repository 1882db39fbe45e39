"""Who may connect to a listener with keys: ZeroMQ asks this thread about every handshake (its protocol is "ZAP")."""

from __future__ import annotations

import threading

import zmq
from zmq.utils import z85

from bagpipe.wire.endpoint import CopyableSocket

_ADDRESS = "inproc://zeromq.zap.01"
_MECHANISM = 5  # then the credentials; before: version, number of the request, domain, address and routing id


class Admission:
    """Admits the holders of one key; ends with its context."""

    def __init__(self, context: zmq.Context[CopyableSocket], client_public: str) -> None:
        self._key = z85.decode(client_public)
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(_ADDRESS)
        self.refused = 0
        self.thread = threading.Thread(target=self._run, name="bagpipe-admission", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with self._socket as socket:
            while True:
                try:
                    request = socket.recv_multipart()
                    socket.send_multipart(self._answer(request))
                except zmq.ContextTerminated:
                    return

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, number = request[:2]
        admitted = request[_MECHANISM:] == [b"CURVE", self._key]
        self.refused += not admitted
        status, text = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        return [version, number, status, text, b"", b""]
