"""From cells to seconds since 1970; as for numbers, each cell is good, missing or wrong."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.prepare.cell_kernels import (
    GOOD,
    MINUS,
    MISSING,
    PLUS,
    POINT,
    SPACE,
    WRONG,
    ZERO,
    Bytes,
    Integer,
    Ints,
    States,
)
from bagpipe.kernels import kernel

HOURS, ISO = 0, 1
"""Ways to write a time: yymmddhh, and 2014-10-21T00:00:00."""

_COMMA, _COLON, _LETTER_T, _LETTER_Z = (ord(c) for c in ",:TZ")
_MONTHS = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])
_DAY_SECONDS, _HOUR_SECONDS, _MINUTE_SECONDS = 86_400, 3_600, 60
_NEVER = -(2**62)


@kernel
def _digits(data: Bytes, position: Integer, end: Integer, count: int) -> int:
    """A number of so many digits at a position; -1 if there is none."""
    if position + count > end:
        return -1
    number = 0
    for j in range(count):
        byte = data[position + j]
        if byte < ZERO or byte >= ZERO + 10:
            return -1
        number = number * 10 + (byte - ZERO)
    return number


@kernel
def _day_seconds(year: int, month: int, day: int) -> int:
    """Seconds from 1970 to the start of a day; _NEVER if there is no such day."""
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if year < 1 or month < 1 or month > 12 or day < 1 or day > _MONTHS[month] + (leap and month == 2):
        return _NEVER
    before = year - 1
    days = before * 365 + before // 4 - before // 100 + before // 400
    for earlier in range(1, month):
        days += _MONTHS[earlier]
    days += leap and month > 2
    return (days + day - 1 - 719_162) * _DAY_SECONDS  # days from the year 1 to 1970


@kernel
def _read_iso(data: Bytes, position: Integer, end: Integer) -> int:
    seconds = _day_seconds(
        _digits(data, position, end, 4), _digits(data, position + 5, end, 2), _digits(data, position + 8, end, 2)
    )
    if seconds == _NEVER or data[position + 4] != MINUS or data[position + 7] != MINUS:
        return _NEVER
    position += 10
    if position == end:
        return seconds
    hour, minute, second = _digits(data, position + 1, end, 2), _digits(data, position + 4, end, 2), 0
    between = position + 6 <= end and data[position + 3] == _COLON
    if not between or (data[position] != _LETTER_T and data[position] != SPACE):
        return _NEVER
    position += 6
    if position < end and data[position] == _COLON:
        second = _digits(data, position + 1, end, 2)
        position += 3
        if position < end and (data[position] == POINT or data[position] == _COMMA):
            position += 1
            fraction = position
            while position < end and ZERO <= data[position] < ZERO + 10:
                position += 1
            if position == fraction:
                return _NEVER
    if hour < 0 or hour > 23 or minute < 0 or minute > 59 or second < 0 or second > 59:
        return _NEVER
    seconds += hour * _HOUR_SECONDS + minute * _MINUTE_SECONDS + second
    if position < end and data[position] == _LETTER_Z:
        position += 1
    elif position < end and (data[position] == PLUS or data[position] == MINUS):
        sign = 1 if data[position] == PLUS else -1
        hour, minute = _digits(data, position + 1, end, 2), 0
        position += 3
        if position < end:
            position += data[position] == _COLON
            minute = _digits(data, position, end, 2)
            position += 2
        if hour < 0 or hour > 23 or minute < 0 or minute > 59:
            return _NEVER
        seconds -= sign * (hour * _HOUR_SECONDS + minute * _MINUTE_SECONDS)
    return seconds if position == end else _NEVER


@kernel
def read_times(data: Bytes, starts: Ints, lengths: Ints, way: int, times: NDArray[np.int64], states: States) -> None:
    """Seconds since 1970 of times written as HOURS or ISO, fractions cut off; 0 where missing or wrong."""
    for i in range(len(starts)):
        position, end = np.int64(starts[i]), np.int64(starts[i]) + np.int64(lengths[i])
        times[i] = 0
        if position == end:
            states[i] = MISSING
            continue
        if way == ISO:
            seconds = _read_iso(data, position, end)
        else:
            year, month = _digits(data, position, end, 2), _digits(data, position + 2, end, 2)
            day, hour = _digits(data, position + 4, end, 2), _digits(data, position + 6, end, 2)
            seconds = _day_seconds(2000 + year, month, day)
            if end - position != 8 or year < 0 or hour < 0 or hour > 23:
                seconds = _NEVER
            seconds += hour * _HOUR_SECONDS
        states[i] = GOOD if seconds > _NEVER // 2 else WRONG
        if states[i] == GOOD:
            times[i] = seconds
