"""Requests to servers without a network."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _told_soon_that_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """How soon shows nothing about a server, and tests await it."""
    monkeypatch.setattr("bagpipe.wire.connection.TICK_S", 0.02)
