import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.data.prepare import sorting
from bagpipe.data.prepare.block import BEGINNING, Place
from bagpipe.data.prepare.reading import open_sources, read_blocks
from bagpipe.data.prepare.schema import parse_schema
from bagpipe.data.prepare.sorting import in_time_order
from bagpipe.data.prepare.sources import find_sources
from bagpipe.errors import DataError
from harness.blocks import problems_of, samples_of
from harness.examples import examples

SCHEMA = parse_schema(
    {
        "format": "tsv",
        "columns": ["y", "n", "m", "c", "i", "g", "t"],
        "label": "y",
        "numeric": ["n", {"column": "m", "transform": "none"}],
        "categorical": ["c", {"column": "i", "kind": "integer"}, {"column": "g", "separator": "|"}],
        "time": "t",
        "sort": True,
    }
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("sorting")


def blocks_of(directory, times, block_bytes=80):
    path = directory / "data.tsv"
    lines = []
    for n, time in enumerate(times):
        cells = [n % 2, n, -n, "" if n % 7 == 3 else f"v{n}", n if n % 5 else "", "|".join("abc"[: n % 4])]
        lines.append("\t".join(map(str, [*cells, "never" if time is None else time])) + "\n")
    path.unlink(missing_ok=True)
    path.write_text("".join(lines) or "\n")
    return list(read_blocks(SCHEMA, find_sources([path]), block_bytes=block_bytes))


@given(
    times=st.lists(st.one_of(st.none(), st.integers(-3, 3), st.integers(0, 10**9)), max_size=60),
    memory=st.sampled_from([1, 500, 2000, 10**6]),
    fan_in=st.sampled_from([2, 3, 64]),
    block_bytes=st.sampled_from([50, 300, 10_000]),
)
@examples(60)
def test_the_order_is_that_of_a_stable_sort_whatever_the_memory(directory, times, memory, fan_in, block_bytes):
    blocks = blocks_of(directory, times, block_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "FAN_IN", fan_in)
        result = list(in_time_order(blocks, directory, memory_bytes=memory))
    assert samples_of(result) == sorted(samples_of(blocks), key=lambda sample: sample[-1])
    assert problems_of(result) == problems_of(blocks)
    assert [path.name for path in directory.iterdir()] == ["data.tsv"]


@pytest.mark.parametrize("fan_in", [2, 5, 64])
def test_samples_of_one_second_stay_in_order_across_runs_and_passes(directory, monkeypatch, fan_in):
    monkeypatch.setattr(sorting, "FAN_IN", fan_in)
    random.seed(2)
    blocks = blocks_of(directory, [random.randrange(6) for _ in range(600)])
    total = sum(sorting._batch(block).nbytes for block in blocks)
    result = list(in_time_order(blocks, directory, memory_bytes=total // 3))
    assert samples_of(result) == sorted(samples_of(blocks), key=lambda sample: sample[-1])


def test_from_every_place_the_rest_comes(directory):
    random.seed(0)
    blocks = blocks_of(directory, [random.choice([None, None, None, *range(9)]) for _ in range(40)])
    for memory in (2000, 10**6):
        result = list(in_time_order(blocks, directory, memory_bytes=memory))
        assert result[0].start == BEGINNING
        for i, block in enumerate(result):
            rest = list(in_time_order(blocks, directory, block.end, memory_bytes=3000))
            assert samples_of(rest) == samples_of(result[i + 1 :])
            assert problems_of(rest) == problems_of(result[i + 1 :])
        assert result[-1].end == Place(0, len(problems_of(blocks)), len(samples_of(blocks)))


def test_problems_come_while_reading_so_that_a_run_can_stop_at_the_first(directory):
    blocks = blocks_of(directory, [1, None, 2] * 10)
    result = in_time_order(iter(blocks), directory)
    first = next(block for block in result if block.problems)
    assert len(first) == 0
    assert first.dense.shape == (0, 2)
    assert list(first.categories) == ["c", "i", "g"]
    result.close()


def test_blocks_stay_small(directory, monkeypatch):
    monkeypatch.setattr(sorting, "BLOCK_ROWS", 8)
    blocks = blocks_of(directory, list(range(50, 0, -1)))
    result = list(in_time_order(blocks, directory))
    assert max(len(block) for block in result) == 8
    assert [sample[-1] for sample in samples_of(result)] == list(range(1, 51))


def test_memory_is_not_that_of_the_data(directory, monkeypatch):
    """What is held at a time: batches being collected, and those being merged, count by their bytes."""
    sizes = []
    plain = sorting._sorted

    def measured(batches):
        sizes.append(sum(batch.nbytes for batch in batches))
        return plain(batches)

    monkeypatch.setattr(sorting, "_sorted", measured)
    random.seed(1)
    blocks = blocks_of(directory, [random.randrange(10**6) for _ in range(5000)], block_bytes=1000)
    total = sum(sorting._batch(block).nbytes for block in blocks)
    result = list(in_time_order(blocks, directory, memory_bytes=total // 4))
    assert len(samples_of(result)) == 5000
    assert max(sizes) < total // 4
    assert len(sizes) > 50


def test_a_source_without_times_or_with_a_disk_that_can_not_be_written_is_named(directory):
    blocks = blocks_of(directory, [3, 2, 1])
    with pytest.raises(DataError, match="no time to sort them by"):
        list(in_time_order([replace(block, times=None) for block in blocks], directory))
    with pytest.raises(DataError, match=r"sorted-0\.arrow can't be written while samples are sorted"):
        list(in_time_order(blocks, directory / "none", memory_bytes=1))


def test_ratings_of_movielens_come_in_order_of_time(tmp_path):
    (tmp_path / "movies.csv").write_text("movieId,title\n")
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,10,4.0,300\n1,11,3.5,100\n2,10,5.0,200\n")
    schema, sources = open_sources("movielens", [tmp_path])
    blocks = list(in_time_order(read_blocks(schema, sources), tmp_path))
    assert [(sample[0], sample[2], sample[-1]) for sample in samples_of(blocks)] == [
        (0, [1, 11], 100),
        (1, [2, 10], 200),
        (1, [1, 10], 300),
    ]
