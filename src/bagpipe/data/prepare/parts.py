"""Which samples are of which day, and which are to train, validate and test on: ranges of the order of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.manifest import NAME_LENGTH_MAX, RangeEntry
from bagpipe.data.prepare.block import Block
from bagpipe.data.prepare.sources import Source
from bagpipe.errors import ConfigError, DataError

_DAY_SECONDS = 86_400
_EPOCH = date(1970, 1, 1).toordinal()
_SUFFIXES = (".gz", ".gzip", ".zst", ".bz2", ".lz4")


def day_names(sources: Sequence[Source]) -> list[str]:
    """The name of each file, without what compressing it has added.

    Files of one name have as many of their directories before it as tell them apart: they are days of their own.
    """
    paths = [source.path.absolute() for source in sources]
    paths = [path.with_suffix("") if path.suffix in _SUFFIXES else path for path in paths]
    places = defaultdict(list)
    for path in paths:
        places[path.name].append(path)
    names = ["/".join(path.parts[-_parts_needed(places[path.name]) :]) for path in paths]
    for source, name in zip(sources, names, strict=True):
        if len(name) > NAME_LENGTH_MAX:
            raise DataError(
                f"{source.path}: its day would be called {name!r}, which has more than {NAME_LENGTH_MAX} characters: "
                "give the file, or directories that tell it from others of its name, shorter names"
            )
    return names


def _parts_needed(paths: Sequence[Path]) -> int:
    """To tell paths apart, from their end on."""
    number = 1
    while len({path.parts[-number:] for path in paths}) < len(set(paths)):
        number += 1
    return number


class Days:
    """Where each day begins: by the times of samples where there are any, else by file."""

    def __init__(self, sources: Sequence[Source], known: Sequence[RangeEntry] = ()) -> None:
        self._sources = sources
        self._starts = [(day.name, day.start) for day in known]
        self.num_samples = known[-1].stop if known else 0

    @cached_property
    def _names(self) -> list[str]:
        return day_names(self._sources)

    def add(self, block: Block) -> None:
        """Take note of the next samples."""
        if block.times is None:
            name = self._names[block.start.file]
            if len(block) and (not self._starts or self._starts[-1][0] != name):
                self._starts.append((name, self.num_samples))
        elif len(block):
            self._add_times(block, block.times // _DAY_SECONDS)
        self.num_samples += len(block)

    def _add_times(self, block: Block, days: NDArray[np.int64]) -> None:
        before = date.fromisoformat(self._starts[-1][0]).toordinal() - _EPOCH if self._starts else int(days[0]) - 1
        latest = np.maximum(np.maximum.accumulate(days), before)
        if len(late := np.flatnonzero(days < latest)):
            self._refuse(block, int(late[0]), _name(days[late[0]]), _name(latest[late[0]]))
        for place in np.flatnonzero(np.diff(latest, prepend=before)).tolist():
            self._starts.append((_name(latest[place]), self.num_samples + place))

    def _refuse(self, block: Block, place: int, day: str, latest: str) -> None:
        where = f"sample {self.num_samples + place:,}"
        if block.lines is not None:
            where = f"{self._sources[block.start.file].path}, line {block.lines[place]:,}"
        raise DataError(
            f"{where}: its date is {day}, but {latest} came before it, so samples would be counted to a wrong day: "
            "put `sort = true` into the schema"
        )

    def ranges(self) -> tuple[RangeEntry, ...]:
        """The days so far."""
        stops = [start for _, start in self._starts[1:]] + [self.num_samples]
        return tuple(
            RangeEntry(name=name, start=start, stop=stop)
            for (name, start), stop in zip(self._starts, stops, strict=False)
        )


def _name(day: np.int64) -> str:
    return date.fromordinal(int(day) + _EPOCH).isoformat()


def check_split(validation: str | None, test: str | None, days: Sequence[str] | None) -> None:
    """Find out before anything is read what can't be divided; `days` are the names known by now, if they are."""
    shares = {}
    for name, option in (("validation", validation), ("test", test)):
        share = None if option is None else _share(option)
        if share is not None and not 0 < share < 1:
            raise ConfigError(f"--{name} {option} is no share: give one between 0 and 1, or leave --{name} out")
        shares[name] = share or 0.0
    if sum(shares.values()) >= 1:
        raise ConfigError(
            f"--validation {validation} and --test {test} leave nothing to train on: give shares that are together "
            "less than 1"
        )
    for option in (validation, test):
        if option is not None and _share(option) is None and days is not None and option not in days:
            raise ConfigError(f"there is no day {option!r} to divide at: there are {', '.join(days)}")


def parts_of(days: Sequence[RangeEntry], validation: str | None, test: str | None) -> tuple[RangeEntry, ...]:
    """The parts train, validation and test, in order of time; none if none was asked for.

    A part is given as a share of all samples, or by the name of the day with which it begins.
    """
    if validation is None and test is None:
        return ()
    stop = days[-1].stop
    parts = []
    for name, option in (("test", test), ("validation", validation)):
        if option is not None:
            start = _start(days, option, stop)
            parts.append(RangeEntry(name=name, start=start, stop=stop))
            if not 0 < start < stop:
                raise ConfigError(
                    f"--{name} {option} is samples {start} to {stop}: choose another share or day, so that it and what "
                    "comes before it have samples"
                )
            stop = start
    parts.append(RangeEntry(name="train", start=0, stop=stop))
    return tuple(reversed(parts))


def _start(days: Sequence[RangeEntry], option: str, stop: int) -> int:
    share = _share(option)
    if share is not None:
        return stop - int(days[-1].stop * share)
    for day in days:
        if day.name == option:
            return day.start
    raise ConfigError(f"there is no day {option!r} to divide at: there are {', '.join(day.name for day in days)}")


def _share(option: str) -> float | None:
    try:
        return float(option)
    except ValueError:
        return None
