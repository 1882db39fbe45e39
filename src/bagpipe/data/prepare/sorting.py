"""Samples in order of time, by an external sort: memory is bounded by a setting, the rest lies in files (I5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from bagpipe.data.prepare.block import BEGINNING, Block, Place


def in_time_order(
    blocks: Iterable[Block], directory: Path, start: Place = BEGINNING, *, memory_bytes: int = 256 << 20
) -> Iterator[Block]:
    """The samples of all blocks in order of time, those of one second as they came; `directory` takes what is spooled.

    First, while everything is read, come blocks without samples, with the problems. Places are not those of the files:
    `offset` counts problems and `line` samples, and from one of them (all files are read and sorted again) the rest
    comes as it would have come.
    """
    raise NotImplementedError
