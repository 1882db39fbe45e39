"""A directory of shards as a data set: mapped into memory, checked at first touch, read in any order."""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.dataset import IndexedDataset, Part
from bagpipe.data.manifest import FeatureEntry, load_manifest
from bagpipe.data.samples import Column, Samples, spans
from bagpipe.data.shard_file import Places, ShardFile
from bagpipe.errors import ConfigError

Ints = NDArray[np.int64]
Piece = tuple[ShardFile, Places, Places]
"""A shard, samples of it (counted from its first), and where they go."""


class Shards(IndexedDataset):
    """The data set in a directory of shards."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest = load_manifest(self.path)
        self.tables = self.manifest.table_records()
        self.num_dense, self.num_samples = self.manifest.dense, self.manifest.samples
        self._starts = np.array([0, *accumulate(shard.samples for shard in self.manifest.shards)], dtype=np.int64)
        self._open: dict[int, ShardFile] = {}
        self._opening = Lock()
        entries = {feature.name: feature for feature in self.manifest.features}
        self._features = [entries[name] for table in self.tables for name in table.features]

    @property
    def part_names(self) -> tuple[str, ...]:
        """The parts that the data set was divided into when it was written; empty: none."""
        return tuple(entry.name for entry in self.manifest.parts)

    def part_named(self, name: str) -> Part:
        """A part, such as `train`, as a data set of its own."""
        for entry in self.manifest.parts:
            if entry.name == name:
                return self.part(entry.start, entry.stop)
        known = f"it has {', '.join(self.part_names)}" if self.part_names else "it was not divided"
        raise ConfigError(f"{self.path} has no part {name!r}: {known}; prepare it with --validation or --test")

    def gather(self, samples: Ints) -> Samples:
        """The columns of these samples."""
        pieces = self._pieces(samples)
        dense = np.empty((len(samples), self.num_dense), dtype=np.float32)
        labels = np.empty(len(samples), dtype=np.float32)
        for shard, rows, slots in pieces:
            shard.copy("labels", rows, labels, slots)
            shard.copy("dense", rows, dense, slots)
        columns = {
            feature.name: self._bags(feature, pieces, len(samples))
            if feature.ids is None
            else self._fixed(feature, pieces, (len(samples), feature.ids))
            for feature in self._features
        }
        return Samples(dense, columns, labels)

    def _shard(self, number: int) -> ShardFile:
        with self._opening:
            if number not in self._open:
                entry = self.manifest.shards[number]
                first = int(self._starts[number])
                self._open[number] = ShardFile(self.path / entry.file, entry, self.manifest, first)
            return self._open[number]

    def _pieces(self, samples: Ints) -> list[Piece]:
        if not len(samples):
            return []
        first, last = int(samples[0]), int(samples[-1])
        owners = np.searchsorted(self._starts, samples, side="right") - 1
        if last - first == len(samples) - 1 and (np.diff(samples) == 1).all():
            return [self._run(number, first, last + 1) for number in range(owners[0], owners[-1] + 1)]
        order = np.argsort(owners, kind="stable")
        numbers, begins = np.unique(owners[order], return_index=True)
        groups = np.split(order, begins[1:])
        return [
            (self._shard(number), samples[slots] - self._starts[number], slots)
            for number, slots in zip(numbers.tolist(), groups, strict=True)
        ]

    def _run(self, number: int, start: int, stop: int) -> Piece:
        """The part of samples start to stop that lies in a shard."""
        base = int(self._starts[number])
        low, high = max(start, base), min(stop, int(self._starts[number + 1]))
        return self._shard(number), slice(low - base, high - base), slice(low - start, high - start)

    def _fixed(self, feature: FeatureEntry, pieces: list[Piece], shape: tuple[int, int]) -> Column:
        values = np.empty(shape, dtype=np.int64)
        weights = np.empty(shape, dtype=np.float32) if feature.weighted else None
        for shard, rows, slots in pieces:
            shard.copy(f"ids:{feature.name}", rows, values, slots)
            if weights is not None:
                shard.copy(f"weights:{feature.name}", rows, weights, slots)
        return Column(values, None, weights)

    def _bags(self, feature: FeatureEntry, pieces: list[Piece], num_samples: int) -> Column:
        bounds = [shard.bag_bounds(feature.name, rows) for shard, rows, _ in pieces]
        lengths = np.empty(num_samples, dtype=np.int64)
        for (_, _, slots), (starts, ends) in zip(pieces, bounds, strict=True):
            lengths[slots] = ends - starts
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        values = np.empty(offsets[-1], dtype=np.int64)
        weights = np.empty(offsets[-1], dtype=np.float32) if feature.weighted else None
        for (shard, _, slots), (starts, ends) in zip(pieces, bounds, strict=True):
            places: Places
            if isinstance(slots, slice):
                places = slice(int(starts[0]), int(ends[-1]))
                out: Places = slice(int(offsets[slots.start]), int(offsets[slots.stop]))
            else:
                places, out = spans(starts, ends - starts), spans(offsets[slots], ends - starts)
            shard.copy_values(f"ids:{feature.name}", places, values, out)
            if weights is not None:
                shard.copy_values(f"weights:{feature.name}", places, weights, out)
        return Column(values, offsets, weights)
