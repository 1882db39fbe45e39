"""Defects put in on purpose at the seams of the system, to see that tests and the run-time checker notice them.

Exactness is data: a wait is switched off by editing the plans, a lost, old or mixed-up row comes from a store that
misbehaves, a wrong gradient from a group that does. Nothing of the loop itself is replaced.
"""

from __future__ import annotations

from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.stages import Wait


def forget_victims_at_barriers(monkeypatch):
    """A barrier that writes what is in the cache, and forgets rows that are just leaving it."""

    def flush(pipeline):
        yield Wait("its turn", lambda: True)
        for block in pipeline._cache.take_dirty():
            yield from pipeline._write(block)

    monkeypatch.setattr(Pipeline, "_flush", flush)
