"""What holds for every test."""

import pytest


@pytest.fixture(autouse=True)
def small_program(monkeypatch):
    """Data is prepared as in a process of its own: what earlier tests left in this one's memory does not count."""
    monkeypatch.setattr("bagpipe.data.prepare.options.resident_bytes", lambda: 300_000_000)
