"""Defects put in on purpose at the seams of the system, to see that tests and the run-time checker notice them.

Exactness is data: a wait is switched off by editing the plans, a lost, old or mixed-up row comes from a store that
misbehaves, a wrong gradient from a group that does. Nothing of the loop itself is replaced.
"""

from __future__ import annotations

from unittest.mock import patch

from bagpipe.server.watermark import Watermark
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.stages import Wait


def forget_victims_at_barriers(monkeypatch):
    """A barrier that writes what is in the cache, and forgets rows that are just leaving it."""

    def flush(pipeline):
        yield Wait("its turn", lambda: True)
        for block in pipeline._cache.take_dirty():
            yield from pipeline._write(block)

    monkeypatch.setattr(Pipeline, "_flush", flush)


def admit_reads_early(monkeypatch):
    """A server that answers a read at once though the iteration that it must follow is not passed: by one."""
    _counts_one_more(monkeypatch, "admit")


def release_reads_early(monkeypatch):
    """A server that parks such a read and answers it when the iteration before that is passed."""
    _counts_one_more(monkeypatch, "advance")


def _counts_one_more(monkeypatch, name):
    exact, reached = getattr(Watermark, name), Watermark.reached

    def early(watermark, *arguments):
        with patch.object(Watermark, "reached", property(lambda each: reached.fget(each) + 1)):
            return exact(watermark, *arguments)

    monkeypatch.setattr(Watermark, name, early)
