"""What a trainer's pipeline has moved, and how long training waited for it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Traffic:
    """Counted since the first plan."""

    fetched_rows: int = 0
    fetched_bytes: int = 0
    """Of values; less than whole rows where another trainer has the optimizer state."""
    written_rows: int = 0
    unique_rows: int = 0
    hit_rows: int = 0
    stall_s: float = 0.0
    plan_s: float = 0.0
    """Spent on making plans, or waiting for them; the loader included."""
    fetch_s: float = 0.0
    """Spent on reading rows from the store."""
    iterations: int = 0
    lookahead_sum: int = 0
    peak_rows: int = 0
    """Slots in use at the most: by rows that plans keep, rows fetched ahead and rows that have not left yet, so it
    depends on how far apart the stages were. Of one among several trainers: by the rows that it updates, which are its
    share where rows have owners; copies of rows that others update are not counted."""
    windows: str = ""
    """The lengths of windows that were chosen, if a policy chooses them."""

    def seconds(self) -> float:
        """Now, since any moment."""
        return time.perf_counter()

    @property
    def lookahead(self) -> float:
        """Effective lookahead, mean over iterations."""
        return self.lookahead_sum / max(1, self.iterations)

    def summary(self) -> dict[str, Any]:
        """For people."""
        return {
            "iterations": self.iterations,
            "hit_rate": self.hit_rows / self.unique_rows if self.unique_rows else math.nan,
            "fetched_rows": self.fetched_rows,
            "fetched_bytes": self.fetched_bytes,
            "written_rows": self.written_rows,
            "stall_seconds": self.stall_s,
            "lookahead": self.lookahead,
            "peak_rows": self.peak_rows,
        } | ({"windows": self.windows} if self.windows else {})
