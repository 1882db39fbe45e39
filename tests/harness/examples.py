"""How many examples a property test tries, and which: the profile that HYPOTHESIS_PROFILE names.

`ci`     the same examples in every run; the default where CI=true
`dev`    others in every run, and those that failed before first; the default elsewhere
`chaos`  many more; a failure prints the line that replays it (`@reproduce_failure`)
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_CHAOS_FACTOR = 10
# No deadlines and no check of slowness: a busy machine must not fail a test.
_SLOW = [HealthCheck.too_slow]
_PROFILES = {
    "ci": settings(deadline=None, suppress_health_check=_SLOW, derandomize=True, database=None, print_blob=True),
    "dev": settings(deadline=None, suppress_health_check=_SLOW, derandomize=False),
    "chaos": settings(
        deadline=None, suppress_health_check=_SLOW, derandomize=False, print_blob=True, max_examples=100 * _CHAOS_FACTOR
    ),
}


def load_profile() -> str:
    """Make the profile that the environment asks for the default of all settings; its name."""
    default = "ci" if os.environ.get("CI", "").lower() in ("1", "true") else "dev"
    name = os.environ.get("HYPOTHESIS_PROFILE") or default
    if name not in _PROFILES:
        raise ValueError(f"HYPOTHESIS_PROFILE is {name!r}: choose one of {', '.join(_PROFILES)}")
    settings.register_profile(name, _PROFILES[name])
    settings.load_profile(name)
    return name


PROFILE = load_profile()


def examples(number: int, suppress: tuple[HealthCheck, ...] = (), **options) -> settings:
    """Settings with so many examples, and in `chaos` a multiple of them: an explicit number hides the profile's."""
    factor = _CHAOS_FACTOR if PROFILE == "chaos" else 1
    return settings(max_examples=number * factor, suppress_health_check=[*_SLOW, *suppress], **options)
