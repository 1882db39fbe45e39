"""XXH64, a public 64-bit checksum: a change of a few bits, or a cut, goes unseen once in 2**64 times.

Chosen over CRC-32 because it keeps up with memory: checkpoints are summed beside training. Not against forgery.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import inlined, kernel

Words = NDArray[np.uint64]
Octets = NDArray[np.uint8]

STRIPE_BYTES = 32
P1, P2, P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
P4, P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_MASK = 2**64 - 1


@inlined
def _rotated(value: np.uint64, bits: int) -> np.uint64:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@inlined
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotated(lane + word * P2, 31) * P1


@kernel
def _mix_stripes(lanes: Words, words: Words) -> None:
    """Cost: one read of the words; four chains that don't wait for each other."""
    a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
    for i in range(0, words.shape[0], 4):
        a = _round(a, words[i])
        b = _round(b, words[i + 1])
        c = _round(c, words[i + 2])
        d = _round(d, words[i + 3])
    lanes[0], lanes[1], lanes[2], lanes[3] = a, b, c, d


class Xxh64:
    """The checksum of bytes that come piece by piece."""

    def __init__(self) -> None:
        p1, p2 = int(P1), int(P2)
        self._lanes: Words = np.array([(p1 + p2) & _MASK, p2, 0, -p1 & _MASK], np.uint64)
        self._rest = b""
        self._num_bytes = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes; the GIL is free while long ones are summed."""
        view = memoryview(data).cast("B")
        self._num_bytes += len(view)
        if self._rest:
            missing = STRIPE_BYTES - len(self._rest)
            self._rest += bytes(view[:missing])
            view = view[missing:]
            if len(self._rest) < STRIPE_BYTES:
                return
            self._mix(self._rest)
        whole = len(view) - len(view) % STRIPE_BYTES
        if whole:
            self._mix(view[:whole])
        self._rest = bytes(view[whole:])

    def hexdigest(self) -> str:
        """The checksum of all bytes so far, as 16 digits."""
        return f"{self._finished():016x}"

    def _mix(self, stripes: bytes | memoryview) -> None:
        octets: Octets = np.frombuffer(stripes, np.uint8)
        if octets.ctypes.data % 8:
            octets = octets.copy()
        _mix_stripes(self._lanes, octets.view(np.uint64))

    def _finished(self) -> int:
        p1, p2, p3, p4, p5 = int(P1), int(P2), int(P3), int(P4), int(P5)
        if self._num_bytes < STRIPE_BYTES:
            total = p5
        else:
            lanes = [int(lane) for lane in self._lanes]
            total = sum(_turned(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
            for lane in lanes:
                total = ((total ^ _round_of(0, lane)) * p1 + p4) & _MASK
        total = (total + self._num_bytes) & _MASK
        rest = self._rest
        while len(rest) >= 8:
            total = (_turned(total ^ _round_of(0, int.from_bytes(rest[:8], "little")), 27) * p1 + p4) & _MASK
            rest = rest[8:]
        if len(rest) >= 4:
            total = (_turned(total ^ (int.from_bytes(rest[:4], "little") * p1 & _MASK), 23) * p2 + p3) & _MASK
            rest = rest[4:]
        for octet in rest:
            total = _turned(total ^ (octet * p5 & _MASK), 11) * p1 & _MASK
        total = (total ^ total >> 33) * p2 & _MASK
        total = (total ^ total >> 29) * p3 & _MASK
        return total ^ total >> 32


def xxh64(*parts: bytes | bytearray | memoryview) -> str:
    """The checksum of bytes, one part after the other, as 16 digits."""
    total = Xxh64()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def _turned(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def _round_of(lane: int, word: int) -> int:
    return _turned((lane + word * int(P2)) & _MASK, 31) * int(P1) & _MASK
