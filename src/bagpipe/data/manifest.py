"""`manifest.json`: what a directory of shards holds, and the checksums that vouch for it (I8).

Read from files that anyone may have written: every field is checked, and nothing outside the directory can be named.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bagpipe.bounded import RECORD_BYTES_MAX, read_bounded, shown
from bagpipe.errors import ShardError
from bagpipe.table import Table

FORMAT = "bagpipe-shards"
VERSION = 2
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary"
"""The directory, beside the manifest, of the files that say which value each row stands for."""

Count = Annotated[int, Field(ge=0, le=2**62)]
Checksum = Annotated[int, Field(ge=0, lt=2**32)]
NAME_LENGTH_MAX = 200
Name = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH_MAX)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$")]
"""A name in the directory itself: no separator, no `..`, nothing hidden."""


class Record(BaseModel):
    """A checked, unchangeable part of a manifest or header; unknown fields are refused, and not told: the file may be
    another, with a secret."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class VocabularyEntry(Record):
    """A file of the directory `vocabulary`: line i says which value row i stands for, and how often it occurred."""

    file: FileName
    bytes: Count
    checksum: Checksum
    """CRC-32 of the file."""


class NumberingEntry(Record):
    """How the values of a column became the ids of a table."""

    kind: Literal["first", "frequency", "hash", "ids"]
    min_count: Annotated[int, Field(ge=1, le=2**62)]
    """Values that occurred less often share a row."""
    values: Literal["text", "integer"]
    vocabulary: VocabularyEntry | None
    """Null where ids are computed from the values (hash, ids)."""


class TableEntry(Record):
    """A table."""

    name: Name
    rows: Annotated[int, Field(ge=1, le=2**63)] | None
    features: Annotated[tuple[Name, ...], Field(min_length=1)]
    numbering: NumberingEntry | None = None
    """Null: the ids are the data's own."""


class FeatureEntry(Record):
    """How the ids of a feature are stored."""

    name: Name
    ids: Annotated[int, Field(ge=0, le=2**20)] | None
    """Ids a sample; null: bags of any length."""
    weighted: bool


class ShardEntry(Record):
    """A file."""

    file: FileName
    samples: Annotated[int, Field(ge=1, le=2**40)]
    bytes: Count
    checksum: Checksum
    """CRC-32 of the file's header, which has those of all that follows."""


class RangeEntry(Record):
    """A run of samples that has a name."""

    name: Name
    start: Count
    stop: Count


class Manifest(Record):
    """What a directory of shards holds."""

    format: str = FORMAT
    version: int = VERSION
    origin: str = ""
    """Where the samples come from, for people."""
    samples: Count
    dense: Annotated[int, Field(ge=0, le=2**20)]
    """Numeric features of a sample."""
    numeric: tuple[Name, ...] = ()
    """Their names, where they have any."""
    tables: tuple[TableEntry, ...]
    features: tuple[FeatureEntry, ...]
    shards: tuple[ShardEntry, ...]
    parts: tuple[RangeEntry, ...] = ()
    """What to train, validate and test on."""
    days: tuple[RangeEntry, ...] = ()
    """The samples of each file that was prepared, which for logs are days."""
    skipped: Count = 0
    """Lines of the raw files that gave no sample."""
    checksum: Checksum = 0
    """CRC-32 of this record without this field, as compact JSON with sorted keys."""

    def sealed(self) -> Manifest:
        """The same with its checksum."""
        return self.model_copy(update={"checksum": self._crc()})

    def text(self) -> str:
        """The contents of the file."""
        return self.model_dump_json(indent=1) + "\n"

    def table_records(self) -> tuple[Table, ...]:
        """The tables as the rest of Bagpipe knows them."""
        return tuple(Table(table.name, table.rows, table.features) for table in self.tables)

    def table_rows(self) -> dict[str, int | None]:
        """Rows of the table of each feature."""
        return {feature: table.rows for table in self.tables for feature in table.features}

    def vocabularies(self) -> dict[str, VocabularyEntry]:
        """The vocabulary of each table that has one."""
        numbered = {table.name: table.numbering for table in self.tables}
        return {name: entry.vocabulary for name, entry in numbered.items() if entry and entry.vocabulary}

    def _crc(self) -> int:
        body = self.model_dump(mode="json", exclude={"checksum"})
        return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


class _Version(BaseModel):
    model_config = ConfigDict(strict=True, hide_input_in_errors=True)
    format: str
    version: int


def load_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a directory."""
    path = directory / MANIFEST
    try:
        data = read_bounded(path, ShardError, RECORD_BYTES_MAX)
    except FileNotFoundError:
        hint = "write the data again, into a new directory" if directory.is_dir() else "check the path"
        raise ShardError(f"{path} does not exist, so {directory} is not a complete data set: {hint}") from None
    except OSError as error:
        raise ShardError(f"{path} can't be read ({error.strerror}): check the path and its permissions") from error
    try:
        stamp = _Version.model_validate_json(data)
        if (stamp.format, stamp.version) != (FORMAT, VERSION):
            raise ShardError(
                f"{path} has format {stamp.format!r} version {stamp.version}, this is {FORMAT!r} version {VERSION}: "
                "write the data again, or use the version of Bagpipe that wrote it"
            )
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise ShardError(f"{path} is not a manifest: {_first(error)}; write the data again") from error
    _check(path, manifest)
    return manifest


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the file"
    value = "" if first["type"] in ("extra_forbidden", "missing") else f" (value {str(first['input'])[:80]!r})"
    return f"{where}: {first['msg']}{value}"


def _check(path: Path, manifest: Manifest) -> None:
    # The checksum first: what it finds is damage, what is found after it is a wrong writer.
    checksum = manifest._crc()
    if manifest.checksum != checksum:
        raise ShardError(
            f"{path} has checksum {manifest.checksum}, its contents {checksum}: it was damaged or edited; "
            "write the data again"
        )
    for what, names in (
        ("table", [table.name for table in manifest.tables]),
        ("feature", [feature.name for feature in manifest.features]),
        ("shard", [shard.file for shard in manifest.shards]),
        ("numeric feature", list(manifest.numeric)),
        ("part", [part.name for part in manifest.parts]),
        ("vocabulary", [entry.file for entry in manifest.vocabularies().values()]),
    ):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ShardError(f"{path} names {what} {min(twice)!r} twice: write the data again")
    looked_up = [name for table in manifest.tables for name in table.features]
    if sorted(looked_up) != sorted(feature.name for feature in manifest.features):
        raise ShardError(
            f"{path}: the features of the tables, {shown(looked_up)}, are not those stored: write the data again"
        )
    total = sum(shard.samples for shard in manifest.shards)
    if total != manifest.samples:
        raise ShardError(f"{path} has {manifest.samples} samples, its shards {total}: write the data again")
    if manifest.numeric and len(manifest.numeric) != manifest.dense:
        raise ShardError(
            f"{path} names {len(manifest.numeric)} numeric features and has {manifest.dense}: write the data again"
        )
    for entry in (*manifest.parts, *manifest.days):
        if not entry.start <= entry.stop <= manifest.samples:
            raise ShardError(
                f"{path}: {entry.name!r} is samples {entry.start} to {entry.stop} of {manifest.samples}: "
                "write the data again"
            )
