"""Writing shards: nothing is written over, nothing half-written is ever taken for data (I6, I8).

The manifest's temporary file claims the directory, each shard is renamed once it is on disk, the manifest comes last.
When anything goes wrong all that was written is removed, but for shards that the caller has put on record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from bagpipe.bounded import RECORD_BYTES_MAX
from bagpipe.data.dataset import Dataset
from bagpipe.data.manifest import MANIFEST, FeatureEntry, Manifest, ShardEntry, TableEntry
from bagpipe.data.shard_file import allowed, first_bad
from bagpipe.data.shard_layout import column_types, encode, id_type
from bagpipe.errors import BatchError, ConfigError, ShardError, ValueRangeError
from bagpipe.table import Table

if TYPE_CHECKING:
    from bagpipe.types import Batch, Ids

Array = NDArray[Any]
Progress = Callable[[int, int], None]
"""Called with samples written and samples in all."""


@dataclass(frozen=True, slots=True)
class Written:
    """Finished shards and the kinds of their features: what a writer that goes on later has to be given."""

    features: tuple[FeatureEntry, ...]
    shards: tuple[ShardEntry, ...]


SHARD_SAMPLES = 1 << 18
READ_SAMPLES = 1 << 14


def write(
    dataset: Dataset,
    path: str | os.PathLike[str],
    *,
    shard_samples: int = SHARD_SAMPLES,
    workers: int = 1,
    progress: Progress | None = None,
    origin: str | None = None,
) -> Manifest:
    """Write all samples of a data set, in stored order, as shards into a new or empty directory."""
    if not dataset.num_samples:
        raise ConfigError("the data set has no samples: there is nothing to write")
    origin = str(getattr(dataset, "origin", "")) if origin is None else origin
    with ShardWriter(path, dataset.tables, dataset.num_dense, shard_samples=shard_samples, origin=origin) as writer:
        for batch in dataset.batches(min(READ_SAMPLES, shard_samples), workers=workers):
            writer.add(batch)
            if progress is not None:
                progress(writer.num_samples, dataset.num_samples)
        return writer.finish()


class ShardWriter:
    """Writes batches as shards; a context that removes what it wrote unless `finish` was called.

    `growing` are tables whose size is known only at the end. `on_shard` is called after each shard: once it returns,
    the shards so far stay whatever happens. `done` are those of an earlier writer in this directory, to go on after.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tables: tuple[Table, ...],
        num_dense: int,
        *,
        shard_samples: int = SHARD_SAMPLES,
        origin: str = "",
        growing: Collection[str] = (),
        on_shard: Callable[[Written], None] | None = None,
        done: Written | None = None,
    ) -> None:
        if shard_samples < 1:
            raise ConfigError(f"shard_samples is {shard_samples}: give at least 1")
        self.path = Path(path)
        self._shard_samples, self._origin = shard_samples, origin
        self._tables, self._num_dense = tables, num_dense
        self._growing = {name for table in tables if table.name in growing for name in table.features}
        self._features = (done.features or None) if done is not None else None
        self._pending: list[Batch] = []
        self._shards = list(done.shards) if done is not None else []
        self._on_shard, self._goes_on = on_shard, done is not None
        self._num_kept = len(self._shards)
        self.num_samples = sum(shard.samples for shard in self._shards)
        self._finished = False

    def __enter__(self) -> ShardWriter:
        self._made_directory = False if self._goes_on else _claim(self.path)
        return self

    def keep(self, num_shards: int) -> None:
        """Leave the directory claimed and its first shards there, whatever happens: they are on record."""
        self._goes_on, self._num_kept = True, num_shards

    @property
    def room(self) -> int:
        """Samples that the shard in the making still takes."""
        return self._shard_samples - sum(map(len, self._pending))

    def __exit__(self, *_: object) -> None:
        if not self._finished:
            self._remove()

    def add(self, batch: Batch) -> None:
        """Take the samples of a batch, after those taken before; the kinds of its features are those of the first."""
        import torch  # here: who only reads shards does without it

        features = tuple(_describe(name, batch) for table in self._tables for name in table.features)
        if self._features is None:
            self._features = features
        if features != self._features:
            raise BatchError(f"batch {batch.number} has {features}, the first one had {self._features}: store one kind")
        if batch.dense.shape[1:] != (self._num_dense,) or batch.dense.dtype != torch.float32:
            raise BatchError(
                f"batch {batch.number} has numeric features of shape {tuple(batch.dense.shape)}, {batch.dense.dtype}: "
                f"give (samples, {self._num_dense}), torch.float32"
            )
        self._check_values(batch)
        while len(batch):
            room = self.room
            self._pending.append(batch.part(0, min(room, len(batch))))
            self.num_samples += len(self._pending[-1])
            if len(self._pending[-1]) == room:
                self._flush()
            batch = batch.part(min(room, len(batch)), len(batch))

    def flush(self) -> None:
        """Write what is left as a shard."""
        if self._pending:
            self._flush()

    def finish(self, complete: Callable[[Manifest], Manifest] = lambda manifest: manifest) -> Manifest:
        """Write what is left and then the manifest, which `complete` may add to; the directory is a data set now."""
        self.flush()
        manifest = complete(self._manifest()).sealed()
        # The names of the shards must be on disk before the manifest speaks of them.
        _sync_directory(self.path)
        text = manifest.text().encode()
        if len(text) > RECORD_BYTES_MAX:
            raise ShardError(
                f"{self.path / MANIFEST} would have {len(text):,} B for {len(manifest.shards):,} shards, at most "
                f"{RECORD_BYTES_MAX:,} are read: write larger shards"
            )
        write_file(self.path / MANIFEST, [text], "wb")
        self._finished = True
        _sync_directory(self.path)
        return manifest

    def _manifest(self) -> Manifest:
        return Manifest(
            origin=self._origin,
            samples=self.num_samples,
            dense=self._num_dense,
            tables=tuple(TableEntry(name=t.name, rows=t.rows, features=t.features) for t in self._tables),
            features=self._features or (),
            shards=tuple(self._shards),
        )

    def _flush(self) -> None:
        batches, self._pending = self._pending, []
        samples = sum(map(len, batches))
        types = column_types(self._manifest())
        columns = self._columns(batches)
        for feature in self._growing:
            types[f"ids:{feature}"] = id_type(int(columns[f"ids:{feature}"].max(initial=0)) + 1)
        columns = {name: array.astype(types[name]) for name, array in columns.items()}
        pieces, checksum = encode(samples, columns)
        name = f"shard-{len(self._shards):05d}.bin"
        size = sum(map(len, pieces))
        # Known before it exists, so that it is removed if writing it fails.
        self._shards.append(ShardEntry(file=name, samples=samples, bytes=size, checksum=checksum))
        write_file(self.path / name, pieces, "xb")
        if self._on_shard is not None:
            _sync_directory(self.path)
            self._on_shard(Written(self._features or (), tuple(self._shards)))
            self._num_kept = len(self._shards)

    def _columns(self, batches: list[Batch]) -> Mapping[str, Array]:
        columns: dict[str, Array] = {
            "labels": np.concatenate([batch.labels.numpy() for batch in batches]),
            "dense": np.concatenate([batch.dense.numpy() for batch in batches]),
        }
        for feature in self._features or ():
            ids = [batch.sparse[feature.name] for batch in batches]
            if feature.ids is None:
                lengths = np.concatenate([part.lengths().numpy() for part in ids])
                columns[f"offsets:{feature.name}"] = np.concatenate([[0], np.cumsum(lengths)])
            columns[f"ids:{feature.name}"] = np.concatenate([part.values.numpy() for part in ids])
            if feature.weighted:
                columns[f"weights:{feature.name}"] = np.concatenate([_weights(part) for part in ids])
        return columns

    def _check_values(self, batch: Batch) -> None:
        rows = {feature: table.rows for table in self._tables for feature in table.features}
        columns = [("labels", "", batch.labels.numpy()), ("dense", "", batch.dense.numpy())]
        for name in rows:
            ids = batch.sparse[name]
            columns.append(("ids", name, ids.values.numpy()))
            if ids.weights is not None:
                columns.append(("weights", name, ids.weights.numpy()))
        for kind, feature, values in columns:
            place = first_bad(kind, values.reshape(-1), rows.get(feature))
            if place is not None:
                sample = self.num_samples + _owner(batch, kind, feature, place)
                what = f"{kind} of {feature!r}" if feature else kind
                raise ValueRangeError(
                    f"{self.path}, sample {sample}: {what} is {values.reshape(-1)[place]}, "
                    f"{allowed(kind, rows.get(feature))}; mend the source and write the data again"
                )

    def _remove(self) -> None:
        for shard in self._shards[self._num_kept :]:
            (self.path / shard.file).unlink(missing_ok=True)
            (self.path / f"{shard.file}.tmp").unlink(missing_ok=True)
        if self._num_kept or self._goes_on:
            return
        (self.path / f"{MANIFEST}.tmp").unlink(missing_ok=True)
        if self._made_directory:
            self.path.rmdir()


def _describe(name: str, batch: Batch) -> FeatureEntry:
    if name not in batch.sparse:
        raise BatchError(f"batch {batch.number} has no ids of feature {name!r}: add it, or take it out of its table")
    ids = batch.sparse[name]
    width = None if ids.offsets is not None else ids.values.shape[1]
    return FeatureEntry(name=name, ids=width, weighted=ids.weights is not None)


def _weights(ids: Ids) -> Array:
    assert ids.weights is not None
    weights: Array = ids.weights.numpy()
    return weights


def _owner(batch: Batch, kind: str, feature: str, place: int) -> int:
    """The sample of a batch that owns a value of a column."""
    if not feature:
        return place // batch.dense.shape[1] if kind == "dense" else place
    ids = batch.sparse[feature]
    if ids.offsets is not None:
        return int(np.searchsorted(ids.offsets.numpy(), place, side="right")) - 1
    return place // int(ids.values.shape[1])


def _claim(path: Path) -> bool:
    """Make the directory, or check that it is empty, and take it; says whether it was made."""
    try:
        made = not path.is_dir()
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ShardError(f"{path} is not empty: choose another directory, or remove it")
        (path / f"{MANIFEST}.tmp").open("xb").close()
    except FileExistsError as error:
        raise ShardError(f"{path} is a file, or is being written: choose another directory") from error
    except OSError as error:
        raise ShardError(f"{path} can't be written ({error.strerror}): choose another directory") from error
    return made


def write_file(path: Path, pieces: Iterable[bytes | memoryview], mode: Literal["xb", "wb"]) -> None:
    """Write a file that is there as a whole or not at all; `xb` refuses to write over a half-written one."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open(mode) as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise ShardError(
            f"{path} can't be written ({error.strerror}): free space or choose another directory"
        ) from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
