"""What the kernels of `bagpipe.data.prepare.keymap` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.prepare.keymap import MISSING, RARE, RESERVED, Bools, Clash, Ints, Words


class KeyMapByDict:
    """Twin of `KeyMap` over plain Python."""

    def __init__(self) -> None:
        self._position_of: dict[int, int] = {}
        self._checks: list[int] = []
        self.counts: list[int] = []

    def __len__(self) -> int:
        return len(self.counts)

    def admit(self, keys: Words, checks: NDArray[np.uint32], missing: Bools, ids: Ints, *, grow: bool = True) -> Ints:
        """As `KeyMap.admit`."""
        fresh = []
        for i, (key, check) in enumerate(zip(keys.tolist(), checks.tolist(), strict=True)):
            ids[i] = MISSING
            if missing[i]:
                continue
            if key not in self._position_of and not grow:
                ids[i] = RARE
                continue
            position = self._position_of.setdefault(key, len(self.counts))
            if position == len(self.counts):
                self._checks.append(check)
                self.counts.append(0)
                fresh.append(i)
            if self._checks[position] != check:
                raise Clash(i, position)
            self.counts[position] += 1
            ids[i] = position + RESERVED
        return np.array(fresh, np.int64)

    def rank(self, min_count: int, by_frequency: bool) -> list[int]:
        """As `KeyMap.rank`."""
        kept = [position for position, count in enumerate(self.counts) if count >= min_count]
        return sorted(kept, key=lambda position: -self.counts[position]) if by_frequency else kept
