"""What can be set about policies, in plain values: the same on every side of a wire. Each policy says what it uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal, get_args

from bagpipe.errors import ConfigError

Replacement = Literal["lru", "lfu", "random"]
Mode = Literal["strict", "stale"]
MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Settings of policies; what a policy does not use is ignored."""

    sample: int = 64
    """Batches that are looked at before the first plan, to learn how often each row is used, spread over all data if it
    can be read twice, else the first ones; 0: all data (static, frequency)."""
    replacement: Replacement = "lru"
    """Which row that is not held leaves first (scratchpipe)."""
    pipelined: bool = True
    """Off: nothing is fetched before the iteration before has been written back (every policy)."""
    threads: int = 0
    """Threads that share the oracle's work, which changes no plan; 0: by the cores that there are (every policy)."""
    oracles: int = 1
    """Oracles that divide the tables among them, each with its part of the cache (every policy)."""
    ways: int = 16
    """Places that a row of a large table can be in (windowed)."""
    preload: bool = False
    """Whether the rows of a window are all fetched with its first batch; else each with the first that uses it
    (windowed)."""
    windows: str = ""
    """Empty: windows have `lookahead` batches. "measured": their length follows from times. A list such as "16,48:24",
    as a measured run has recorded it: so many batches, and another number from an iteration on (windowed)."""
    mode: Mode = "strict"
    """stale: rows are read a window ahead without waiting for their last write-back, which can lose an update
    (windowed)."""
    seed: int = 0
    """Fixes what is drawn at random (scratchpipe with replacement random, windowed)."""

    def __post_init__(self) -> None:
        for name, least, most, reason in BOUNDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"policy option {name} is {value!r}: give a whole number, at least {least}")
            if value > most:
                raise ConfigError(f"policy option {name} is {value}: give at most {most}{reason}")
        for name, allowed in (("replacement", get_args(Replacement)), ("mode", get_args(Mode))):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"policy option {name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}"
                )
        for name in ("pipelined", "preload"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"policy option {name} is {getattr(self, name)!r}: give True or False")
        if self.windows != MEASURED and (self.windows or not isinstance(self.windows, str)):
            parse_windows(self.windows)
        if self.windows == MEASURED and self.oracles > 1:
            raise ConfigError(
                f"policy option windows is 'measured' and oracles is {self.oracles}: one oracle measures; leave "
                "oracles out, or give the windows that a run with one oracle has recorded"
            )
        if self.windows == MEASURED and self.mode == "stale":
            raise ConfigError(
                "policy option windows is 'measured' and mode is 'stale': how old the rows are would depend on times; "
                "give the lookahead, or the windows that a run with mode 'strict' has recorded"
            )


SAMPLE_MAX = 4096
THREADS_MAX = 64
ORACLES_MAX = 64
WAYS_MAX = 4096
SEED_MAX = 2**63 - 1
BOUNDS = (
    ("sample", 0, SAMPLE_MAX, ", as its batches lie in memory, or 0 for all data"),
    ("threads", 0, THREADS_MAX, ""),
    ("oracles", 1, ORACLES_MAX, ""),
    ("ways", 1, WAYS_MAX, ", as all of a set are looked at for each row"),
    ("seed", 0, SEED_MAX, ""),
)
DEFAULTS = PolicyOptions()


def as_options(given: PolicyOptions | Mapping[str, Any] | None) -> PolicyOptions:
    """Options, however they were given."""
    if given is None or isinstance(given, PolicyOptions):
        return given or DEFAULTS
    if not isinstance(given, Mapping):
        raise ConfigError(f"the options of the policy are {given!r}: give a mapping such as {{'sample': 32}}")
    known = [field.name for field in fields(PolicyOptions)]
    for name in given:
        if name not in known:
            raise ConfigError(f"there is no policy option {name!r}: choose from {', '.join(known)}")
    return PolicyOptions(**given)


def parse_windows(text: object) -> list[tuple[int, int]]:
    """From which iteration on windows have which length: "16,48:24" has windows of 16, and of 24 from 48 on."""
    pairs = [part.split(":") for part in f"0:{text}".split(",")]
    if isinstance(text, str) and all(len(pair) == 2 and all(map(str.isdecimal, pair)) for pair in pairs):
        windows = [(int(begin), int(length)) for begin, length in pairs]
        if all(a < b for (a, _), (b, _) in pairwise(windows)) and all(1 <= length < 65535 for _, length in windows):
            return windows
    raise ConfigError(
        f"policy option windows is {text!r}: give {MEASURED!r}, or lengths, each but the first behind the iteration "
        "that it begins at, such as '16,48:24' for windows of 16 batches, and of 24 from iteration 48 on"
    )
