"""A stretch of a block, for shards end where they end and not where blocks do."""

from __future__ import annotations

from dataclasses import replace

from bagpipe.data.prepare.block import Block, Category


def part_of(block: Block, start: int, stop: int) -> Block:
    """Samples start to stop of a block, without its problems; places are those of the whole block."""
    if (start, stop) == (0, len(block)):
        return block
    return replace(
        block,
        labels=block.labels[start:stop],
        dense=block.dense[start:stop],
        categories={name: _part(category, start, stop) for name, category in block.categories.items()},
        times=None if block.times is None else block.times[start:stop],
        problems=(),
        lines=None if block.lines is None else block.lines[start:stop],
    )


def _part(category: Category, start: int, stop: int) -> Category:
    offsets = category.offsets
    if offsets is not None:
        first, last = int(offsets[start]), int(offsets[stop])
        offsets = offsets[start : stop + 1] - first
    else:
        first, last = start, stop
    return Category(
        category.values.slice(first, last - first),
        category.keys[first:last],
        category.checks[first:last],
        category.missing[first:last],
        offsets,
    )
