import gzip
import runpy
import shutil
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bagpipe.data.prepare.block import BEGINNING, Place
from bagpipe.data.prepare.reading import open_sources, read_blocks
from bagpipe.data.prepare.schema import parse_schema
from bagpipe.data.prepare.sources import find_sources
from bagpipe.errors import ConfigError, DataError
from harness.blocks import problems_of, samples_of
from harness.examples import examples

SCHEMA = parse_schema(
    {"format": "tsv", "columns": ["y", "n", "c"], "label": "y", "numeric": ["n"], "categorical": ["c"]}
)
RAW = Path(__file__).parents[3] / "raw"
CELL = st.sampled_from(["", "a", "bb", "0123456789", "é", '"', "x y"])
LINE = st.one_of(
    st.builds("{}\t{}\t{}".format, st.sampled_from("01"), st.sampled_from(["", "3", "-2", "7.5"]), CELL),
    st.sampled_from(["", "1\t2", "1\tx\ty", "2\t0\ta", "1\t2\t3\t4"]),
)
TEXT = st.builds(
    lambda lines, end, last: end.join(lines) + (end if last else ""),
    st.lists(LINE, min_size=1, max_size=12),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
).filter(bool)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


def written(directory, *texts, packed=False):
    paths = []
    for number, text in enumerate(texts):
        data = text if isinstance(text, bytes) else text.encode()
        paths.append(directory / f"day_{number}")
        paths[-1].unlink(missing_ok=True)
        paths[-1].write_bytes(gzip.compress(data) if packed else data)
    return find_sources(paths)


def read(sources, start=BEGINNING, schema=SCHEMA, **options):
    return list(read_blocks(schema, sources, start, **options))


@given(texts=st.lists(TEXT, min_size=1, max_size=2), block_bytes=st.integers(20, 90), threads=st.integers(1, 3))
@example(texts=["\n\n", "1\t2\ta"], block_bytes=20, threads=2)
@examples(80)
def test_neither_the_size_of_blocks_nor_threads_nor_gzip_change_the_samples(directory, texts, block_bytes, threads):
    sources = written(directory, *texts)
    whole = read(sources, threads=1)
    small = read(sources, block_bytes=block_bytes, threads=threads)
    packed = read(written(directory, *texts, packed=True), block_bytes=block_bytes, threads=threads)
    assert samples_of(small) == samples_of(whole) == samples_of(packed)
    assert problems_of(small) == problems_of(whole) == problems_of(packed)
    for blocks in (small, packed):
        for block, after in pairwise(blocks):
            assert after.start == (block.end if block.end.file == after.start.file else Place(after.start.file, 0, 0))
            assert block.position <= after.position


@pytest.mark.parametrize("packed", [False, True])
def test_from_every_place_the_rest_comes(directory, packed):
    texts = ["1\t2\ta\n\n0\t\tb\r\n1\tx\tc\n0\t4\t\n", "1\t1\té\n0\t2\tz"]
    sources = written(directory, *texts, packed=packed)
    whole = samples_of(read(sources))
    problems = problems_of(read(sources))
    assert len(whole) == 5
    places = 0
    for file, text in enumerate(texts):
        lines = text.encode().splitlines(keepends=True)
        for line in range(len(lines) + 1):
            start = Place(file, sum(map(len, lines[:line])), line)
            blocks = read(sources, start, block_bytes=12)
            assert samples_of(blocks) == whole[len(whole) - len(samples_of(blocks)) :]
            left = [p for p in problems if Path(p.file).name > f"day_{file}" or p.line > line]
            assert problems_of(blocks) == (left if file == 0 else [])
            places += 1
    assert places == 9


def test_every_block_ends_where_a_run_can_go_on(directory):
    sources = written(directory, "".join(f"{n % 2}\t{n}\tv{n}\n" for n in range(50)))
    blocks = read(sources, block_bytes=40)
    assert len(blocks) > 10
    for i, block in enumerate(blocks):
        assert samples_of(read(sources, block.end, block_bytes=70)) == samples_of(blocks[i + 1 :])


def test_lines_are_counted_with_header_and_empty_ones_and_bytes_are_exact(directory):
    schema = parse_schema({"format": "csv", "label": "y", "categorical": ["c"]})
    sources = written(directory, "\ufeffc,y\r\n\r\na,1\r\n\nb,2\nc,0")
    [block] = read(sources, schema=schema)
    assert (block.start, block.end) == (Place(0, 8, 1), Place(0, sources[0].size, 6))
    assert [(p.line, p.column, p.reason, p.text) for p in block.problems] == [(5, "y", "'2' is not 0 or 1", b"b,2")]
    assert [sample[2] for sample in samples_of([block])] == [["a"], ["c"]]


@pytest.mark.parametrize("ending", ["\n", "", "\r\n"])
def test_a_line_longer_than_a_block_is_a_problem_and_its_neighbours_are_read(directory, ending):
    long = "1\t2\t" + "x" * 200_000
    sources = written(directory, f"1\t1\ta\n{long}\n0\t2\tb\n{long}{ending}")
    blocks = read(sources, block_bytes=64)
    assert [sample[2] for sample in samples_of(blocks)] == [["a"], ["b"]]
    assert [(p.line, p.column, p.reason) for p in problems_of(blocks)] == [
        (line, None, "the line is longer than 64 bytes") for line in (2, 4)
    ]
    assert problems_of(blocks)[0].text == long[:64].encode()
    assert blocks[-1].end == Place(0, sources[0].size, 4)
    assert samples_of(read(sources, blocks[1].end, block_bytes=64)) == samples_of(blocks[2:])


def test_a_line_as_long_as_a_block_is_read(directory):
    line = "1\t2\t" + "x" * 59
    sources = written(directory, f"{line}\n{line}\n{line}x")
    blocks = read(sources, block_bytes=64)
    assert [len(sample[2][0]) for sample in samples_of(blocks)] == [59, 59, 60]
    assert problems_of(blocks) == []


def test_a_file_that_grows_while_it_is_read_ends_the_reading(directory):
    sources = written(directory, "1\t2\ta\n" * 5000)
    blocks = read_blocks(SCHEMA, sources, block_bytes=100)
    next(blocks)
    with sources[0].path.open("ab") as file:
        file.write(b"0\t1\tb\n")
    with pytest.raises(DataError, match=r"day_0 changed while it was read"):
        list(blocks)


def test_a_file_that_changes_after_its_last_block_is_noticed_too(directory):
    sources = written(directory, "1\t2\ta\n", "1\t2\tb\n")
    sources[1].path.write_bytes(b"1\t2\tc\n0\t1\td\n")
    blocks = read_blocks(SCHEMA, sources)
    assert len(next(blocks)) == 1
    with pytest.raises(DataError, match="day_1 changed while it was read"):
        list(blocks)


def test_a_gzip_that_is_cut_short_ends_the_reading_after_what_is_whole(directory):
    path = directory / "cut.gz"
    rng = np.random.default_rng(0)
    text = "".join(f"1\t2\t{n}\n" for n in rng.integers(0, 2**62, 20_000)).encode()
    path.write_bytes(gzip.compress(text)[:-1000])
    blocks = read_blocks(SCHEMA, find_sources([path]), block_bytes=4096)
    good = [next(blocks) for _ in range(3)]
    assert samples_of(good)[0][2] == [text.split(b"\n")[0].split(b"\t")[2].decode()]
    with pytest.raises(DataError, match=r"cut\.gz is damaged or cut short near byte"):
        list(blocks)


def test_stopping_early_leaves_no_thread_and_no_open_file(directory):
    sources = written(directory, "1\t2\ta\n" * 5000)
    before = threading.active_count()
    blocks = read_blocks(SCHEMA, sources, block_bytes=100, threads=2)
    next(blocks)
    blocks.close()
    assert threading.active_count() == before


def test_a_size_of_blocks_out_of_range_is_refused(directory):
    with pytest.raises(ConfigError, match="block_bytes is 0: give 1 to"):
        read(written(directory, "1\t2\ta\n"), block_bytes=0)


def test_all_files_are_checked_for_their_columns_before_any_is_read(directory, tmp_path):
    (tmp_path / "schema.toml").write_text('format = "csv"\nlabel = "y"\ncategorical = ["c"]\n')
    written(directory, "y,c\n1,a\n", "y,d\n1,a\n")
    paths = [directory / "day_0", directory / "day_1"]
    with pytest.raises(DataError, match=r"day_1 has no column 'c', which the schema names; it has: y, d"):
        open_sources("csv", paths, tmp_path / "schema.toml")
    with pytest.raises(ConfigError, match="parquet files need a schema"):
        open_sources("parquet", paths)


def test_a_header_that_is_none_is_named(directory):
    schema = parse_schema({"format": "csv", "label": "y", "categorical": ["c"]})
    for text, message in (
        (b'y,"c\n', "line 1 is no header"),
        (b"y,\xff\n", "not UTF-8"),
        (b"\n1,a\n", "line 1 is no header"),
    ):
        with pytest.raises(DataError, match=message):
            read(written(directory, text), schema=schema)
    with pytest.raises(DataError, match="has no line end in its first"):
        read(written(directory, b"x" * (1 << 20)), schema=schema)


def test_columns_are_found_by_name_in_each_file(directory):
    schema = parse_schema({"format": "csv", "label": "y", "categorical": ["c"], "ignore": ["*"]})
    sources = written(directory, "y,c\n1,a\n", '"c",other,"y"\nb,,0\n')
    assert [(sample[0], sample[2]) for sample in samples_of(read(sources, schema=schema))] == [(1, ["a"]), (0, ["b"])]


@pytest.mark.parametrize(("kind", "file"), [("criteo", "criteo.txt"), ("avazu", "avazu.csv")])
def test_lines_as_downloaded_are_read_to_the_last(kind, file):
    schema, sources = open_sources(kind, [RAW / file])
    blocks = read(sources, schema=schema, block_bytes=10_000)
    assert len(blocks) > 1
    assert problems_of(blocks) == []
    lines = [line.split(schema.cell_separator) for line in (RAW / file).read_text().splitlines()[-200:]]
    first = 14 if kind == "criteo" else 3
    assert [sample[2] for sample in samples_of(blocks)] == [[cell or None for cell in line[first:]] for line in lines]


def test_the_lines_as_downloaded_are_made_and_can_be_made_again(tmp_path):
    shutil.copy(RAW / "make.py", tmp_path)
    runpy.run_path(str(tmp_path / "make.py"), run_name="__main__")
    for name in ("criteo.txt", "avazu.csv"):
        assert (tmp_path / name).read_bytes() == (RAW / name).read_bytes()
