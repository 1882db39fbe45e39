"""Settings of the entries that have another name since the start.

Not in cases.py: what the start gave is kept by the content of that file, and a rename changes nothing there.
"""

from __future__ import annotations

from collections.abc import Iterable

RENAMED: dict[str, str | None] = {}
"""Settings that have another name since, or none any more (None): `key` or `key=value`, to what is given instead."""


def renamed(settings: Iterable[str]) -> list[str]:
    """The settings as they are called now."""
    now = []
    for setting in settings:
        key, _, value = setting.partition("=")
        instead = RENAMED.get(setting, RENAMED.get(key, key))
        if instead is not None:
            now.append(instead if "=" in instead else f"{instead}={value}")
    return now
