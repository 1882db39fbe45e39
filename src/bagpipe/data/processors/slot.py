"""A piece of memory that a data processor fills and its consumer reads: anonymous, so nothing is left behind.

It grows with what is put into it, so no bag is too large, and can't shrink under the one who reads.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.samples import Column, Samples
from bagpipe.errors import PipelineError

Array = NDArray[Any]
Parts = list[list[Any]]
"""For each array [kind, feature, shape, first byte], as they travel in a message."""

ALIGNMENT = 64
TYPES = {"values": "<i8", "offsets": "<i8", "weights": "<f4", "dense": "<f4", "labels": "<f4"}
SPARE = 8
"""A slot that grows gets an eighth more, so that bags which grow slowly don't move it each time."""


class Slot:
    """One process's view of a slot."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: Array = np.empty(0, np.uint8)
        self._closing = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def make(cls) -> Slot:
        """An empty slot."""
        descriptor = os.memfd_create("bagpipe-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(descriptor)

    def put(self, samples: Samples) -> tuple[int, Parts]:
        """Copy samples into the slot; the bytes they take and where each array lies."""
        arrays = list(_arrays(samples))
        parts: Parts = []
        end = 0
        for kind, feature, array in arrays:
            parts.append([kind, feature, list(array.shape), end])
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if end > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, end + end // SPARE)
        memory = self._memory(end, mmap.PROT_READ | mmap.PROT_WRITE)
        for (_, _, array), (*_, start) in zip(arrays, parts, strict=True):
            memory[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        return end, parts

    def take(self, num_bytes: int, parts: Parts, num_samples: int) -> Samples:
        """A copy of the samples in the slot; PipelineError if the message does not fit what is there."""
        size = os.fstat(self.descriptor).st_size
        if not 0 <= num_bytes <= size:
            raise PipelineError(f"a data processor announced {num_bytes} bytes in a slot of {size}: it is damaged")
        # One copy of everything, so that the slot is free at once; the arrays are views of it.
        memory = np.array(self._memory(num_bytes, mmap.PROT_READ)[:num_bytes])
        return _samples([(part[0], part[1], _view(memory, *part)) for part in parts], num_samples)

    def close(self) -> None:
        """Give the memory back."""
        self._map = np.empty(0, np.uint8)
        self._closing()

    def _memory(self, num_bytes: int, access: int) -> Array:
        if len(self._map) < num_bytes:
            size = os.fstat(self.descriptor).st_size
            self._map = np.frombuffer(mmap.mmap(self.descriptor, size, mmap.MAP_SHARED, access), np.uint8)
        return self._map


def _arrays(samples: Samples) -> Iterator[tuple[str, str, Array]]:
    found: list[tuple[str, str, Array | None]] = [("dense", "", samples.dense), ("labels", "", samples.labels)]
    for name, column in samples.columns.items():
        found += [("values", name, column.values), ("offsets", name, column.offsets), ("weights", name, column.weights)]
    for kind, feature, array in found:
        if array is not None:
            yield kind, feature, np.asarray(array, TYPES[kind])


def _view(memory: Array, kind: str, feature: str, shape: Sequence[int], start: int) -> Array:
    dtype = np.dtype(TYPES[kind])
    size = dtype.itemsize
    for length in shape:
        size *= length
    if min(shape, default=0) < 0 or not 0 <= start <= len(memory) - size:
        raise PipelineError(f"a data processor put {kind} {feature} of shape {shape} at byte {start} of {len(memory)}")
    view: Array = memory[start : start + size].view(dtype).reshape(shape)
    return view


def _samples(arrays: list[tuple[str, str, Array]], num_samples: int) -> Samples:
    whole = {kind: array for kind, _, array in arrays if kind in ("dense", "labels")}
    by_feature: dict[str, dict[str, Array]] = {}
    for kind, feature, array in arrays:
        if kind not in whole:
            by_feature.setdefault(feature, {})[kind] = array
    columns = {
        name: Column(parts["values"], parts.get("offsets"), parts.get("weights")) for name, parts in by_feature.items()
    }
    samples = Samples(whole["dense"], columns, whole["labels"])
    lengths = {name: len(c.values) if c.offsets is None else len(c.offsets) - 1 for name, c in columns.items()}
    if {len(samples.dense), len(samples.labels), *lengths.values()} != {num_samples}:
        raise PipelineError(
            f"a data processor gave {len(samples.labels)} samples, with {lengths} of the features, instead of "
            f"{num_samples}: it is damaged"
        )
    return samples
