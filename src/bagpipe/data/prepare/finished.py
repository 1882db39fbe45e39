"""`prepared.json`: what a finished data set was made of, so that the same command knows it and any other is refused.

It is written before the manifest and names its checksum: where there is a manifest it is whole and belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from bagpipe.bounded import RECORD_BYTES_MAX, read_bounded
from bagpipe.data.manifest import Checksum, Manifest, Record
from bagpipe.data.prepare.progress import SourceEntry, check_same
from bagpipe.data.writer import write_file
from bagpipe.errors import ConfigError, ShardError

PREPARED = "prepared.json"
_VERSION = 1


class Finished(Record):
    """What a data set was made of."""

    version: int = _VERSION
    manifest: Checksum
    """That of the manifest."""
    settings: dict[str, str]
    """What the bytes of the data set depend on, the split included."""
    sources: tuple[SourceEntry, ...]
    on_error: str


def save_finished(destination: Path, finished: Finished) -> None:
    """Write the record, before the manifest."""
    write_file(destination / PREPARED, [finished.model_dump_json(indent=1).encode() + b"\n"], "wb")


def check_finished(
    destination: Path, manifest: Manifest, settings: Mapping[str, str], sources: Sequence[SourceEntry], on_error: str
) -> None:
    """See that a finished data set is what this command would make."""
    path = destination / PREPARED
    remedy = f"choose another directory, or remove {destination}"
    try:
        finished = Finished.model_validate_json(read_bounded(path, ShardError, RECORD_BYTES_MAX))
    except (OSError, ValidationError):
        finished = None
    if finished is None or finished.version != _VERSION or finished.manifest != manifest.checksum:
        raise ShardError(
            f"{destination} holds a finished data set, and no {PREPARED} there says what it was made of: {remedy}"
        )
    check_same(f"{destination} holds a finished data set that was made", finished, settings, sources, remedy)
    if manifest.skipped and finished.on_error != on_error:
        raise ConfigError(
            f"{destination} holds a finished data set that was made with on-error {finished.on_error}, which has put "
            f"{manifest.skipped} lines aside, now it is {on_error}: {remedy}"
        )
