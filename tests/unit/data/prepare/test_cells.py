from datetime import datetime

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bagpipe.data.prepare import cell_kernels as kernels
from bagpipe.data.prepare.times import HOURS, ISO, read_times
from definitions.cells import define_gather, define_read_integer
from definitions.times import define_read_time
from harness.examples import examples

LINES = st.text(alphabet='ab12.-\t,:"\r\n é', max_size=80).map(str.encode)


def column(texts):
    """Cells one after the other, with something in between that is not theirs."""
    lengths = np.array([len(text) for text in texts], np.int32)
    starts = np.cumsum([1, *(lengths[:-1] + 1)]).astype(np.int32) if len(texts) else np.empty(0, np.int32)
    data = np.frombuffer(b"#" + b"#".join(texts) + b"#", np.uint8)
    return data, starts, lengths


def cut(text, separator=b"\t", quotes=False, num_columns=30):
    num_lines = text.count(b"\n") + (not text.endswith(b"\n") and text != b"")
    slots = np.arange(num_columns, dtype=np.int32)
    lines, counts, states = np.empty(num_lines, np.int32), np.empty(num_lines, np.int32), np.empty(num_lines, np.uint8)
    found = np.zeros((2, num_columns, num_lines), np.int32)
    data, mark = np.frombuffer(text, np.uint8), np.frombuffer(separator, np.uint8)
    done, num_doubled = kernels.cut_cells(data, mark, quotes, slots, lines, states, counts, found[0], found[1])
    assert done == num_lines
    result = []
    for line in range(num_lines):
        cells = []
        for c in range(min(counts[line], num_columns)):
            start, length = int(found[0, c, line]), int(found[1, c, line])
            cells.append(text[start : start + (length if length >= 0 else ~length)])
        result.append((int(states[line]), int(counts[line]), cells))
    assert num_doubled == int((found[1] < 0).sum())
    return result, lines.tolist()


@pytest.mark.parametrize("separator", [b"\t", b",", b"::"])
@pytest.mark.parametrize("quotes", [False, True])
@given(text=LINES)
@example(text=b"")
@example(text=b"\n\n\r\n")
@example(text=b"a::b:::c\n:\n::\n")
@example(text=b'"a,b","c""d",e\r\n"",x\n')
@example(text=b'"open,b\n"a"x,c\n"a"\r,c\n"')
@examples(150)
def test_lines_are_cut_into_cells_as_plain_python_cuts_them(separator, quotes, text):
    result, _ = cut(text, separator, quotes)
    twin = kernels.cut_cells_reference(text, separator, quotes)
    assert [state for state, _, _ in result] == [state for state, _ in twin]
    for (state, count, found), (_, expected) in zip(result, twin, strict=True):
        if state in (kernels.WHOLE, kernels.EMPTY):
            assert (count, found) == (len(expected), expected[:30])


def test_cells_are_found_in_a_line_longer_than_what_is_looked_at_at_once():
    cells = [b"x" * n for n in (0, 4095, 4096, 4097, 9000, 1)]
    result, lines = cut(b"\t".join(cells) + b"\n" + b"a\tb", num_columns=6)
    assert result == [(kernels.WHOLE, 6, cells), (kernels.WHOLE, 2, [b"a", b"b"])]
    assert lines == [0, sum(map(len, cells)) + 6]


def test_columns_without_a_slot_are_passed_over_and_surplus_ones_are_counted():
    slots = np.array([-1, 0, -1], np.int32)
    data, mark = np.frombuffer(b"a,b,c\nd\ne,f,g,h,i\n", np.uint8), np.frombuffer(b",", np.uint8)
    lines, counts, states = np.empty(3, np.int32), np.empty(3, np.int32), np.empty(3, np.uint8)
    starts, lengths = np.zeros((1, 3), np.int32), np.zeros((1, 3), np.int32)
    kernels.cut_cells(data, mark, False, slots, lines, states, counts, starts, lengths)
    assert counts.tolist() == [3, 1, 5]
    assert starts.tolist() == [[2, 0, 10]]
    assert lengths.tolist() == [[1, 0, 1]]


NUMBERS = [
    b"", b" ", b"0", b"-0", b"7", b"+7", b" 12 ", b"-1", b"4.5", b".5", b"5.", b"-.25", b"0.1", b"123456789012345",
    b"1234567890123456", b"0.30000000000000004", b"1e3", b"1E-3", b"1e400", b"-1e400", b"nan", b"inf", b"1_0", b"abc",
    b".", b"-", b"+", b"1.2.3", b"1 2", b"--1", b"0x10", b"1,5", b"\xc3\xa9", b"9007199254740993", b"1e", b"1e+",
]  # fmt: skip


def read_numbers(texts):
    data, starts, lengths = column(texts)
    numbers, states = np.empty(len(texts)), np.empty(len(texts), np.uint8)
    kernels.read_numbers(data, starts, lengths, numbers, states)
    return numbers, states


@given(
    texts=st.lists(
        st.one_of(
            st.sampled_from(NUMBERS),
            st.floats(allow_nan=False).map(lambda x: repr(x).encode()),
            st.integers(-(10**20), 10**20).map(lambda x: str(x).encode()),
            st.decimals(-(10**6), 10**6, places=6).map(lambda x: str(x).encode()),
            st.text("0123456789.-+eE ", max_size=8).map(str.encode),
        )
    )
)
@example(texts=NUMBERS)
@examples(200)
def test_what_the_quick_way_reads_has_the_bits_of_pythons_float_and_the_rest_is_left_unsure(texts):
    for text, number, state in zip(texts, *read_numbers(texts), strict=True):
        expected, known = kernels.read_number_reference(text)
        if state == kernels.UNSURE:
            assert known in (kernels.GOOD, kernels.WRONG)
        else:
            assert (state, np.float64(number).tobytes()) == (known, np.float64(expected).tobytes())


def test_plain_numbers_need_the_quick_way_only():
    texts = [b"0", b"-1", b"1382", b"4.0", b"3.5", b"999999999999999", b"0.000001"]
    _, states = read_numbers(texts)
    assert (states == kernels.GOOD).all()


@given(
    texts=st.lists(
        st.one_of(
            st.integers(-(2**64), 2**64).map(lambda x: str(x).encode()),
            st.sampled_from([str(limit + n).encode() for limit in (2**63, -(2**63)) for n in range(-12, 12)]),
            st.text("0123456789-+ x", max_size=22).map(str.encode),
        )
    )
)
@example(texts=[b"", b"-", b"+", b"00012", b"99999999999999999999999", b"1.0", b"/", b":"])
@examples(200)
def test_whole_numbers_are_read_up_to_the_last_of_64_bits(texts):
    data, starts, lengths = column(texts)
    integers, states = np.empty(len(texts), np.int64), np.empty(len(texts), np.uint8)
    kernels.read_integers(data, starts, lengths, integers, states)
    expected = [define_read_integer(text) for text in texts]
    assert list(zip(integers.tolist(), states.tolist(), strict=True)) == expected


ISO_TEXTS = [
    b"", b"1970-01-01", b"2014-10-21T05:06:07Z", b"2014-10-21 05:06:07.123456", b"2014-10-21T05:06", b"2000-02-29",
    b"1900-02-29", b"2100-02-29", b"2016-02-29T23:59:59+05:30", b"2016-02-29T00:00:00-0800", b"2016-02-29T00:00:00+01",
    b"0001-01-01", b"9999-12-31T23:59:59Z", b"2014-13-01", b"2014-00-01", b"2014-01-00", b"2014-01-32", b"2014-1-1",
    b"2014-10-21T24:00:00", b"2014-10-21T00:60:00", b"2014-10-21T00:00:60", b"2014-10-21T", b"2014-10-21T00",
    b"2014-10-21T00:00:", b"2014-10-21T00:00:00.", b"2014-10-21T00:00:00Zx", b"2014/10/21", b"20141021", b"x",
    b"2014-10-21T00:00:00+", b"2014-10-21T00:00:00+1", b"2014-10-21T00:00:00+24:00", b"2014-10-21T00:00:00+05:",
    b"2014-10-21T00-00", b"0000-01-01", b"2014-10-21T00:00+00:60",
]  # fmt: skip
HOUR_TEXTS = [
    b"",
    b"14102100",
    b"14102123",
    b"14102124",
    b"00022900",
    b"01022900",
    b"1410210",
    b"141021000",
    b"14132100",
    b"x4102100",
]


@pytest.mark.parametrize(("way", "texts"), [(ISO, ISO_TEXTS), (HOURS, HOUR_TEXTS)])
def test_times_are_those_of_the_standard_library(way, texts):
    assert_times(way, texts)


@given(
    moments=st.lists(st.datetimes()),
    zone=st.sampled_from(["", "Z", "+00:00", "-07:00", "+0530", "+14"]),
    between=st.sampled_from("T "),
    damage=st.integers(0, 40),
)
@examples(100)
def test_any_moment_written_as_iso_is_read_and_a_damaged_one_is_refused(moments, zone, between, damage):
    texts = [(moment.isoformat(between, "seconds") + zone).encode() for moment in moments]
    assert_times(ISO, texts)
    assert_times(ISO, [text[:damage] + b"x" + text[damage + 1 :] for text in texts])
    assert_times(ISO, [text[:damage] for text in texts])


@given(moments=st.lists(st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2099, 12, 31))))
@examples(50)
def test_any_hour_written_as_avazu_does_is_read(moments):
    assert_times(HOURS, [moment.strftime("%y%m%d%H").encode() for moment in moments])


def assert_times(way, texts):
    data, starts, lengths = column(texts)
    times, states = np.empty(len(texts), np.int64), np.empty(len(texts), np.uint8)
    read_times(data, starts, lengths, way, times, states)
    expected = [define_read_time(text, way) for text in texts]
    assert list(zip(times.tolist(), states.tolist(), strict=True)) == expected


@given(texts=st.lists(st.binary(max_size=30), max_size=20))
@examples(100)
def test_cells_are_gathered_as_by_numpy_and_nothing_beyond_the_room_is_written(texts):
    data, starts, lengths = column(texts)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    out, twin = np.full(offsets[-1] + 16, 7, np.uint8), np.zeros(offsets[-1], np.uint8)
    kernels.gather(data, starts, offsets, out)
    define_gather(data, starts, offsets, twin)
    assert out[: offsets[-1]].tobytes() == twin.tobytes() == b"".join(texts)
    assert (out[offsets[-1] + 8 :] == 7).all()


@given(texts=st.lists(st.text("ab|", max_size=8).map(str.encode), max_size=20))
@examples(100)
def test_cells_are_split_into_lists_of_which_an_empty_cell_is_an_empty_one(texts):
    data, starts, lengths = column(texts)
    offsets, none = np.empty(len(texts) + 1, np.int64), np.empty(0, np.int32)
    kernels.split_cells(data, starts, lengths, ord("|"), offsets, none, none)
    counted = offsets.tolist()
    parts = np.empty((2, offsets[-1]), np.int32)
    kernels.split_cells(data, starts, lengths, ord("|"), offsets, parts[0], parts[1])
    expected = [text.split(b"|") if text else [] for text in texts]
    assert offsets.tolist() == counted == np.cumsum([0, *map(len, expected)]).tolist()
    assert [data[s : s + n].tobytes() for s, n in parts.T] == [part for cell in expected for part in cell]
