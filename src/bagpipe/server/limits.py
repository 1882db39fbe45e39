"""What clients may ask of one server (I5)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bagpipe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Beyond these a client is refused, or asked to come again; others do not notice."""

    bytes_max: int = 64 << 20
    """Ids and rows of one request."""
    tables_max: int = 10_000
    width_max: int = 1 << 16
    """Floats of a row."""
    trainers_max: int = 4096
    waiting_bytes: int = 64 << 20
    """Ids of reads that wait for trainers; more are asked to come again."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) <= 0:
                raise ConfigError(f"the limit {each.name} is {value}: give more than 0")
