"""How many examples a property test tries, and which: the profile that HYPOTHESIS_PROFILE names.

`ci`     the same examples in every run; the default where CI=true
`dev`    others in every run, and those that failed before first; the default elsewhere
`chaos`  many more; a failure prints the line that replays it (`@reproduce_failure`)
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_FACTORS = {"ci": 0.4, "dev": 0.4, "chaos": 10}
"""Multiples of the number of examples that a test names: `make test` must end while its user waits."""
_FEWEST = 4
# No deadlines and no check of slowness: a busy machine must not fail a test.
_SLOW = [HealthCheck.too_slow]
_PROFILES = {
    "ci": settings(deadline=None, suppress_health_check=_SLOW, derandomize=True, database=None, print_blob=True),
    "dev": settings(deadline=None, suppress_health_check=_SLOW, derandomize=False),
    "chaos": settings(deadline=None, suppress_health_check=_SLOW, derandomize=False, print_blob=True),
}


def load_profile() -> str:
    """Make the profile that the environment asks for the default of all settings; its name."""
    default = "ci" if os.environ.get("CI", "").lower() in ("1", "true") else "dev"
    name = os.environ.get("HYPOTHESIS_PROFILE") or default
    if name not in _PROFILES:
        raise ValueError(f"HYPOTHESIS_PROFILE is {name!r}: choose one of {', '.join(_PROFILES)}")
    settings.register_profile(name, _PROFILES[name], max_examples=_number(100, name))
    settings.load_profile(name)
    return name


def _number(named: int, profile: str) -> int:
    return max(min(named, _FEWEST), round(named * _FACTORS[profile]))


PROFILE = load_profile()


def examples(number: int, suppress: tuple[HealthCheck, ...] = (), **options) -> settings:
    """Settings with so many examples times the profile's factor: an explicit number hides the profile's own."""
    return settings(max_examples=_number(number, PROFILE), suppress_health_check=[*_SLOW, *suppress], **options)
