"""What the kernels of `bagpipe.data.prepare.times` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from bagpipe.data.prepare.cell_kernels import GOOD, MISSING, WRONG
from bagpipe.data.prepare.times import HOURS

_ISO = re.compile(r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?::(\d\d)(?:[.,]\d+)?)?(Z|[+-]\d\d(?::?\d\d)?)?)?", re.ASCII)


def define_read_time(cell: bytes, way: int) -> tuple[int, int]:
    """`read_times` of one cell, by the standard library."""
    if not cell:
        return 0, MISSING
    text = cell.decode("latin-1")
    try:
        if way == HOURS:
            if not re.fullmatch(r"[0-9]{8}", text):
                return 0, WRONG
            moment = datetime.strptime("20" + text, "%Y%m%d%H").replace(tzinfo=UTC)
        else:
            match = _ISO.fullmatch(text)
            if match is None:
                return 0, WRONG
            zone = (match[4] or "Z").replace("Z", "+00:00").replace(":", "")
            written = f"{match[1]} {match[2] or '00:00'}:{match[3] or '00'} {zone if len(zone) == 5 else zone + '00'}"
            moment = datetime.strptime(written, "%Y-%m-%d %H:%M:%S %z")
    except ValueError:
        return 0, WRONG
    return int(moment.timestamp()), GOOD
