"""What tests with real processes share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def scratch(monkeypatch):
    """Where launches put files of their own, which must be gone in the end; its name is short, for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="bp-", dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path)
