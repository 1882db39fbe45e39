"""Blocks of samples as plain lists, so that two ways to the same samples can be compared."""

from bagpipe.data.prepare.block import Block, Category, Problem


def values_of(category: Category) -> list:
    values = category.values.to_pylist()
    assert [value is None for value in values] == category.missing.tolist()
    assert len(category.keys) == len(category.checks) == len(values)
    if category.offsets is None:
        return values
    assert category.offsets[0] == 0
    assert category.offsets[-1] == len(values)
    return [values[a:b] for a, b in zip(category.offsets[:-1], category.offsets[1:], strict=True)]


def samples_of(blocks: list[Block]) -> list[tuple]:
    """One tuple a sample: label, numbers, categories, keys of categories with one value, time."""
    samples = []
    for block in blocks:
        columns = [values_of(category) for category in block.categories.values()]
        keys = [
            list(zip(category.keys.tolist(), category.checks.tolist(), strict=True))
            for category in block.categories.values()
            if category.offsets is None
        ]
        times = [None] * len(block) if block.times is None else block.times.tolist()
        for column in columns:
            assert len(column) == len(block) == len(block.dense)
        for i in range(len(block)):
            numbers = tuple(block.dense[i].tolist())
            samples.append(
                (float(block.labels[i]), numbers, [column[i] for column in columns], [key[i] for key in keys], times[i])
            )
    return samples


def problems_of(blocks: list[Block]) -> list[Problem]:
    return [problem for block in blocks for problem in block.problems]
