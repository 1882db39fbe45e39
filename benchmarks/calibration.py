"""What a preset's laws of popularity promise, computed rather than drawn: the counts that the papers publish.

For presets without drift and bursts: every sample is drawn like every other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.popularity import sampler
from bagpipe.data.presets import Preset

Floats = NDArray[np.float64]


def expected_rows(preset: Preset, samples: int) -> float:
    """Distinct rows that this many samples touch, in all tables."""
    widths, _, chances = _ranks(preset)
    return float((widths * _touched(chances, samples)).sum())


def expected_shared(preset: Preset, batch_size: int) -> float:
    """Rows of a batch that the next batch needs too."""
    widths, _, chances = _ranks(preset)
    return float((widths * _touched(chances, batch_size) ** 2).sum())


def expected_top_share(preset: Preset, fraction: float) -> float:
    """Share of all accesses that go to the most popular rows, this fraction of all rows."""
    widths, accesses, _ = _ranks(preset)
    order = np.argsort(-accesses, kind="stable")
    rows = np.concatenate([[0.0], np.cumsum(widths[order])])
    share = np.concatenate([[0.0], np.cumsum((widths * accesses)[order])])
    return float(np.interp(fraction * rows[-1], rows, share) / share[-1])


def _touched(chances: Floats, samples: int) -> Floats:
    with np.errstate(divide="ignore"):
        touched: Floats = -np.expm1(samples * np.log1p(-chances))
    return touched


def _ranks(preset: Preset) -> tuple[Floats, Floats, Floats]:
    """Runs of ranks, of all tables: how many, how often a sample has each, the chance that it has it at all."""
    runs = []
    for table in preset.tables:
        ranks = preset.ranks(table)
        accesses = misses = None
        for name in table.features:
            feature = preset.features[name]
            drawn = sampler(feature.popularity, ranks)
            each = np.minimum(drawn.masses / drawn.widths, 1.0)
            # The mean over bag lengths, which are uniform from fewest to most.
            lengths = np.arange(feature.fewest, feature.most + 1)
            missed = ((1 - each)[:, None] ** lengths).mean(1)
            accesses = each * lengths.mean() if accesses is None else accesses + each * lengths.mean()
            misses = missed if misses is None else misses * missed
            widths = drawn.widths
        assert accesses is not None
        assert misses is not None
        runs.append((widths, accesses, 1 - misses))
    widths, accesses, chances = (np.concatenate(parts) for parts in zip(*runs, strict=True))
    return widths, accesses, chances
