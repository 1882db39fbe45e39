"""`manifest.json`: what a checkpoint holds, and the checksums that vouch for it (I6, I8).

Read from files that anyone may have written: the bytes are checked, then every field, and nothing outside the
checkpoint's own directory can be named.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from xxhash import xxh64_hexdigest

from bagpipe._version import __version__
from bagpipe.bounded import RECORD_BYTES_MAX, check_settings
from bagpipe.errors import CheckpointError

FORMAT = "bagpipe-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = RECORD_BYTES_MAX

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Small: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
SmallPositive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Checksum: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""XXH64, in hexadecimal."""
Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""SHA-256, in hexadecimal."""
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
FileName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\Z")]
"""A name in the directory itself: no separator, no `..`, nothing hidden."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checked, unchangeable part of a manifest; unknown fields are refused."""


class RowCount(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How many rows of a table a file has."""

    table: Small
    rows: Count


class ShardOf(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The rows of server `server` among `servers`, counted from 0."""

    server: Small
    servers: SmallPositive


class FileEntry(_Part, frozen=True, kw_only=True):
    """A file of a checkpoint."""

    name: FileName
    bytes: Count
    """Its size."""
    checksum: Checksum
    """Of its bytes, as they lie on the disk."""
    rows: tuple[RowCount, ...] | None = None
    """Of a file of rows, by table in ascending order; None: it is no such file."""
    shard: ShardOf | None = None
    """Of a file of rows: whose they are; None: of all."""


class InitialEntry(_Part, frozen=True, kw_only=True):
    """How the first values of a vector are computed from its key."""

    kind: Name
    """uniform, normal or constant."""
    value: float
    """The scale, the standard deviation, or the constant."""
    table: Text = ""
    """The name that the values are drawn for."""
    seed: int = 0
    column: Small = 0


class TableEntry(_Part, frozen=True, kw_only=True):
    """A table; its number is its place in the list."""

    name: Name
    rows: Positive | None
    """Ids are below it; None: any 64-bit id."""
    dims: Annotated[tuple[SmallPositive, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """Lengths of the vectors of a row."""
    width: SmallPositive
    """Floats of a row: vectors and optimizer state."""
    optimizer: Name
    layers: tuple[Text, ...] = ()
    """The layer of the model that each vector belongs to; empty: not known."""
    initial: tuple[InitialEntry, ...] | None = None
    """How each vector begins, which an export needs for rows that were never written; None: it can't be told."""
    weight_rows: Positive | None = None
    """Rows of the weights of its layers, which may be more than the table has; None: not known, or any id is one."""


class VocabularyEntry(_Part, frozen=True, kw_only=True):
    """A file that says which value each row of a table stands for."""

    path: Text
    checksum: Text


class BaseEntry(_Part, frozen=True, kw_only=True):
    """The checkpoint that an incremental one builds on."""

    done: Count
    checksum: Checksum
    """Of its manifest, so that no other can take its place."""


class RunFacts(_Part, frozen=True, kw_only=True):
    """What a run tells of itself in each of its checkpoints."""

    tables: tuple[TableEntry, ...]
    trainers: Positive = 1
    servers: Count = 0
    """0: rows lie in the process of the trainer."""
    config: dict[str, Any] = {}
    aliases: dict[Text, Text] = {}
    """Further names of weights and tensors in the model, and the first name of each."""
    data: Text = ""
    """A fingerprint of the data and their order; empty: it can't be told."""
    vocabulary: tuple[VocabularyEntry, ...] = ()


class Manifest(RunFacts, frozen=True, kw_only=True):
    """What a checkpoint holds. Its last field in the file is `checksum`, of all bytes before it."""

    format: str = FORMAT
    version: int = VERSION
    bagpipe: Text = __version__
    done: Count
    """Iterations that were over."""
    token: Text = ""
    """Of the mark that it was made of: a server that has this mark has these rows in its memory."""
    generation: Count = 0
    """Of the attempt that wrote it."""
    retained: bool = True
    """Whether it is one that the user has asked for; the others are there for recovery, until there is a later one."""
    base: BaseEntry | None
    """None: all rows are here; else only those written since."""
    files: tuple[FileEntry, ...]
    config_sha256: Digest
    created_at: Text
    """UTC, as in RFC 3339."""

    @classmethod
    def make(cls, facts: RunFacts, *, files: Sequence[FileEntry], **other: Any) -> Manifest:
        """The manifest of a checkpoint that is about to be complete; `other` are its fields by name."""
        created = datetime.now(UTC).isoformat(timespec="microseconds")
        return cls(
            **{name: getattr(facts, name) for name in RunFacts.__struct_fields__},
            files=tuple(sorted(files, key=lambda entry: entry.name)),
            config_sha256=config_sha256(facts.config),
            created_at=created,
            **other,
        )

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(entry.bytes for entry in self.files)

    def file(self, name: str) -> FileEntry | None:
        """The file of that name."""
        return next((entry for entry in self.files if entry.name == name), None)


def config_sha256(config: dict[str, Any]) -> str:
    """A digest of a configuration: of its JSON with sorted keys and without spaces."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def encode_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """The contents of the file, and their checksum."""
    text: bytes = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    head = text.removesuffix(b"\n}") + b","
    checksum = xxh64_hexdigest(head)
    return head + _tail(checksum), checksum


def decode_manifest(path: Path, data: bytes) -> tuple[Manifest, str]:
    """The manifest in a file, and its checksum; CheckpointError names the path and what is wrong."""
    head = data[: -len(_tail("0" * 16))]
    checksum = xxh64_hexdigest(head)
    if head + _tail(checksum) != data:
        _check_version(path, data)
        raise CheckpointError(
            f"{path} is damaged or was edited (its checksum differs): use another checkpoint, or a copy of this one"
        )
    _check_version(path, data)
    try:
        manifest = msgspec.json.decode(head[:-1] + b"}", type=Manifest)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a manifest of a checkpoint ({error}): use another checkpoint") from error
    _check(path, manifest)
    return manifest, checksum


def _tail(checksum: str) -> bytes:
    return b'\n "checksum": "%s"\n}\n' % checksum.encode()


class _Stamp(msgspec.Struct):
    format: str
    version: int


def _check_version(path: Path, data: bytes) -> None:
    """A file of another version is told as such, whatever its checksum is made of; damage is not found here."""
    try:
        stamp = msgspec.json.decode(data, type=_Stamp)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return
    if (stamp.format, stamp.version) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path} has format {stamp.format!r} version {stamp.version}, this Bagpipe reads {FORMAT!r} version "
            f"{VERSION}: use the Bagpipe that wrote it, or another checkpoint"
        )


def _check(path: Path, manifest: Manifest) -> None:
    """What is found here is the fault of whoever wrote the file."""
    remedy = "use another checkpoint"
    check_settings(manifest.config, str(path), CheckpointError)
    for what, names in (
        ("file", [entry.name for entry in manifest.files]),
        ("table", [table.name for table in manifest.tables]),
    ):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise CheckpointError(f"{path} names {what} {min(twice)!r} twice: {remedy}")
    if manifest.file(MANIFEST) is not None:
        raise CheckpointError(f"{path} names itself as one of its files: {remedy}")
    if manifest.base is not None and manifest.base.done >= manifest.done:
        raise CheckpointError(
            f"{path} is of {manifest.done} iterations and builds on {manifest.base.done}, not an earlier one: {remedy}"
        )
    for table in manifest.tables:
        if table.width < sum(table.dims):
            raise CheckpointError(
                f"{path}: rows of table {table.name!r} have {table.width} floats and vectors of {table.dims}: {remedy}"
            )
        if table.weight_rows is not None and table.weight_rows < (table.rows or 0):
            raise CheckpointError(
                f"{path}: table {table.name!r} has {table.rows} rows and weights of {table.weight_rows}: {remedy}"
            )
        per_vector = [len(part) for part in (table.layers, table.initial or ()) if part]
        if any(count != len(table.dims) for count in per_vector):
            raise CheckpointError(
                f"{path}: table {table.name!r} has {len(table.dims)} vectors and layers or initial values of "
                f"{per_vector}: {remedy}"
            )
    for entry in manifest.files:
        numbers = [part.table for part in entry.rows or ()]
        if numbers != sorted(set(numbers)) or any(number >= len(manifest.tables) for number in numbers):
            raise CheckpointError(
                f"{path}: file {entry.name!r} has rows of tables {numbers}, there are {len(manifest.tables)}: {remedy}"
            )
        if entry.shard is not None and entry.shard.server >= entry.shard.servers:
            raise CheckpointError(
                f"{path}: file {entry.name!r} is of server {entry.shard.server} of {entry.shard.servers}: {remedy}"
            )
