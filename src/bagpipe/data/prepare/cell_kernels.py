"""From the bytes of text files to cells, and from cells to numbers; nothing is copied on the way.

A cell is a start and a length in the bytes. Each kernel says of each cell whether it is good, missing or wrong, so that
a bad one can be named by line and column.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import inlined, kernel
from bagpipe.kernels.intrinsics import WORD, load_word, store_word

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
States = NDArray[np.uint8]
Integer = int | np.int64

GOOD, MISSING, WRONG, UNSURE = 0, 1, 2, 3
"""Of a cell; UNSURE: a number that needs more than the quick way."""
WHOLE, EMPTY, OPEN_QUOTE, AFTER_QUOTE = 0, 1, 2, 3
"""Of a line: cut into cells; empty; a quote that is not closed; text between a closing quote and the next separator."""

NEWLINE, RETURN, SPACE, QUOTE, PLUS, MINUS, POINT, ZERO = (ord(c) for c in '\n\r "+-.0')
_MARKED_AT_ONCE = 4096
_POWERS = np.array([10.0**n for n in range(16)])
_DIGITS_MAX = 15  # so many digits, and a power of ten up to 22, are exact in float64: one division rounds correctly
_INT64_MAX = 2**63 - 1


@inlined
def _ends(data: Bytes, position: Integer, separator: Bytes) -> bool:
    """Whether a cell ends here: at a separator, a newline or the end of the data."""
    if position == len(data) or data[position] == NEWLINE:
        return True
    if data[position] != separator[0] or position + len(separator) > len(data):
        return False
    same = True
    for j in range(1, len(separator)):
        same &= data[position + j] == separator[j]
    return same


@kernel
def _mark(data: Bytes, start: Integer, stop: Integer, separator: np.uint8, marks: Ints) -> int:
    """Write where the bytes are that may end a cell; how many. Without branches: many would be guessed wrong."""
    count = 0
    for i in range(start, stop):
        marks[count] = i
        count += (data[i] == separator) | (data[i] == NEWLINE)
    return count


@kernel
def _cut_quoted(data: Bytes, position: int, separator: Bytes) -> tuple[int, int, int, bool]:
    """Of a cell that begins after a quote: where it stops, where the line goes on, its state, any doubled quote."""
    end, doubled, state = len(data), False, WHOLE
    while position < end and data[position] != NEWLINE:
        if data[position] != QUOTE:
            position += 1
        elif position + 1 < end and data[position + 1] == QUOTE:
            doubled = True
            position += 2
        else:
            break
    stop = position
    if position == end or data[position] == NEWLINE:
        return stop, position, OPEN_QUOTE, doubled
    position += 1
    if position < end and data[position] == RETURN and (position + 1 == end or data[position + 1] == NEWLINE):
        position += 1
    while not _ends(data, position, separator):
        state = AFTER_QUOTE
        position += 1
    return stop, position, state, doubled


@kernel
def cut_cells(
    data: Bytes, separator: Bytes, quotes: bool, slots: Ints, lines: Ints, states: States, counts: Ints,
    starts: Ints, lengths: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Cut lines into cells: of column c those of line i go to [slots[c], i], of a column with slot -1 nowhere.

    `lines` takes where each line starts, `counts` how many columns it has. A line ends at a newline, with or without a
    return before it. A cell in quotes that has a doubled quote has the length ~length: it is still doubled. The number
    of lines, and of such cells. About 2 ns a byte.
    """
    end = len(data)
    position, line, num_doubled = 0, 0, 0
    marks, num_marks, mark, marked = np.empty(_MARKED_AT_ONCE + 1, np.int32), 0, 0, 0
    while position < end:
        lines[line] = position
        column, state, more = 0, WHOLE, True
        while more:
            start, doubled, stop = position, False, -1
            if quotes and position < end and data[position] == QUOTE:
                start += 1
                stop, position, fault, doubled = _cut_quoted(data, start, separator)
                state = state if fault == WHOLE else fault
            else:
                while stop < 0:
                    if mark < num_marks:
                        if marks[mark] >= start and _ends(data, marks[mark], separator):
                            stop = marks[mark]
                        mark += 1
                    elif marked < end:
                        first, marked = marked, min(marked + _MARKED_AT_ONCE, end)
                        num_marks, mark = _mark(data, first, marked, separator[0], marks), 0
                    else:
                        stop = end
                position = stop
                if stop > start and data[stop - 1] == RETURN and (position == end or data[position] == NEWLINE):
                    stop -= 1
            if column < len(slots) and slots[column] >= 0:
                starts[slots[column], line] = start
                lengths[slots[column], line] = ~(stop - start) if doubled else stop - start
                num_doubled += doubled
            column += 1
            more = position < end and data[position] != NEWLINE
            if more:
                position += len(separator)
            elif column == 1 and stop == lines[line]:
                state = EMPTY
        position += 1
        states[line] = state
        counts[line] = column
        line += 1
    return line, num_doubled


def cut_cells_reference(text: bytes, separator: bytes, quotes: bool) -> list[tuple[int, list[bytes]]]:
    """The state and the cells of each line, in plain Python; doubled quotes are still doubled."""
    result = []
    for line in text.removesuffix(b"\n").split(b"\n") if text else []:
        line = line.removesuffix(b"\r")
        cells, state, rest = [], WHOLE if line else EMPTY, line
        while True:
            cell, found, after = rest.partition(separator)
            if quotes and rest.startswith(b'"'):
                match = re.match(rb'"((?:[^"]|"")*)"(?!")', rest, re.DOTALL)
                tail = rest[match.end() :] if match else b""
                state = OPEN_QUOTE if not match else AFTER_QUOTE if tail and not tail.startswith(separator) else state
                cell = match[1] if match else rest[1:]
                _, found, after = tail.partition(separator)
            cells.append(cell)
            if not found:
                break
            rest = after
        result.append((state, cells))
    return result


@kernel
def read_numbers(data: Bytes, starts: Ints, lengths: Ints, numbers: NDArray[np.float64], states: States) -> None:
    """Decimal numbers with spaces around them; missing ones are 0. About 10 ns a cell."""
    for i in range(len(starts)):
        position, end = starts[i], starts[i] + lengths[i]
        while position < end and data[position] == SPACE:
            position += 1
        while position < end and data[end - 1] == SPACE:
            end -= 1
        numbers[i] = 0.0
        if position == end:
            states[i] = MISSING
            continue
        negative = data[position] == MINUS
        if negative or data[position] == PLUS:
            position += 1
        mantissa, digits, point = 0, 0, -1
        while position < end and digits <= _DIGITS_MAX:
            byte = data[position]
            if ZERO <= byte < ZERO + 10:
                mantissa = mantissa * 10 + (byte - ZERO)
                digits += 1
            elif byte == POINT and point < 0:
                point = digits
            else:
                break
            position += 1
        if position < end or digits == 0 or digits > _DIGITS_MAX:
            states[i] = UNSURE
            continue
        states[i] = GOOD
        number = mantissa / _POWERS[digits - point] if point >= 0 else np.float64(mantissa)
        numbers[i] = -number if negative else number


_NUMBER = re.compile(rb" *([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?) *")
_NOTHING = re.compile(rb" *")


def read_number_reference(cell: bytes) -> tuple[float, int]:
    """A number and its state, for those that `read_numbers` leaves UNSURE and as its twin; inf and nan are wrong."""
    if _NOTHING.fullmatch(cell):
        return 0.0, MISSING
    match = _NUMBER.fullmatch(cell)
    number = float(match[1]) if match else np.inf
    return (number, GOOD) if np.isfinite(number) else (0.0, WRONG)


@kernel
def read_integers(data: Bytes, starts: Ints, lengths: Ints, integers: NDArray[np.int64], states: States) -> None:
    """Whole numbers of 64 bits, with a sign or without; missing and wrong ones are 0. About 10 ns a cell."""
    for i in range(len(starts)):
        position, end = starts[i], starts[i] + lengths[i]
        integers[i] = 0
        states[i] = MISSING if position == end else GOOD
        negative = position < end and data[position] == MINUS
        if negative or (position < end and data[position] == PLUS):
            position += 1
            if position == end:
                states[i] = WRONG
        limit = np.uint64(_INT64_MAX) + np.uint64(negative)
        number = np.uint64(0)
        while position < end:
            digit = np.uint64(data[position]) - np.uint64(ZERO)  # of what comes before '0' a huge one
            if digit > np.uint64(9) or number > (limit - digit) // np.uint64(10):
                states[i] = WRONG
                break
            number = number * np.uint64(10) + digit
            position += 1
        if states[i] == GOOD:
            integers[i] = -np.int64(number) if negative else np.int64(number)


@kernel
def gather(data: Bytes, starts: Ints, offsets: Ints, out: Bytes) -> None:
    """Copy cells one after the other: cell i to out[offsets[i]:offsets[i + 1]]. About 8 ns for 8 bytes.

    By words, of which the last may reach into the next cell, copied after it: `out` needs a word of room at its end.
    """
    for i in range(len(starts)):
        start, to, end = np.int64(starts[i]), np.int64(offsets[i]), np.int64(offsets[i + 1])
        while to < end and start + WORD <= len(data):
            store_word(out, to, load_word(data, start))
            to += WORD
            start += WORD
        while to < end:
            out[to] = data[start]
            to += 1
            start += 1


@kernel
def split_cells(data: Bytes, starts: Ints, lengths: Ints, separator: int, offsets: NDArray[np.int64],
                part_starts: Ints, part_lengths: Ints) -> None:  # fmt: skip
    """Split cells into lists: parts offsets[i] to offsets[i + 1] are those of cell i; an empty cell has none.

    Without room for parts only the offsets are written.
    """
    parts = 0
    offsets[0] = 0
    for i in range(len(starts)):
        start, end = starts[i], starts[i] + lengths[i]
        for position in range(start, end + 1 if lengths[i] else end):
            if position == end or data[position] == separator:
                if parts < len(part_starts):
                    part_starts[parts] = start
                    part_lengths[parts] = position - start
                start = position + 1
                parts += 1
        offsets[i + 1] = parts
