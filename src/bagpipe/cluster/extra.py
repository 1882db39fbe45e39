"""Ray is an extra: what needs it says so by name, before it does anything else."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from bagpipe.errors import MissingExtraError


def require_ray() -> None:
    """MissingExtraError where Ray is not installed; nothing is imported."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            "bagpipe launch runs its parts as actors of Ray, which is not installed: pip install 'bagpipe[cluster]', "
            "or use bagpipe train, which needs one process only"
        )


def import_ray() -> ModuleType:
    """Ray itself."""
    require_ray()
    return importlib.import_module("ray")
