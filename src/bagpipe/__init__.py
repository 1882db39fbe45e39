"""Train PyTorch recommendation models whose embedding tables do not fit, with exactly the result of plain training.

Names are loaded when they are first used: a server, or `bagpipe --help`, starts without PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from bagpipe._version import __version__

if TYPE_CHECKING:
    from bagpipe import data, errors, initial, optim, schedules
    from bagpipe.checkpoint.export import export
    from bagpipe.checkpointing import Checkpointing
    from bagpipe.errors import BagpipeError
    from bagpipe.prepared import Cache, Files, Options, PreparedLoader, clip_grad_norm_, prepare
    from bagpipe.table import Table
    from bagpipe.types import Batch, Ids

__all__ = [
    "BagpipeError",
    "Batch",
    "Cache",
    "Checkpointing",
    "Files",
    "Ids",
    "Options",
    "PreparedLoader",
    "Table",
    "__version__",
    "clip_grad_norm_",
    "data",
    "errors",
    "export",
    "initial",
    "optim",
    "prepare",
    "schedules",
]

# No module of this package may have the name of something that another module defines: once imported, it would hide it.
_HOMES = {
    "BagpipeError": "bagpipe.errors",
    "Batch": "bagpipe.types",
    "Cache": "bagpipe.prepared",
    "Checkpointing": "bagpipe.checkpointing",
    "Files": "bagpipe.prepared",
    "Ids": "bagpipe.types",
    "Options": "bagpipe.prepared",
    "PreparedLoader": "bagpipe.prepared",
    "Table": "bagpipe.table",
    "clip_grad_norm_": "bagpipe.prepared",
    "export": "bagpipe.checkpoint.export",
    "prepare": "bagpipe.prepared",
}

if not TYPE_CHECKING:  # to type checkers it would define every name, misspelt ones included

    def __getattr__(name: str) -> object:
        if name == "accelerate":
            raise AttributeError(
                "bagpipe.accelerate is gone: build the optimizer from model.parameters() and write "
                "'model, optimizer, loader = bagpipe.prepare(model, optimizer, loader)'"
            )
        if name not in __all__:
            raise AttributeError(f"module 'bagpipe' has no attribute {name!r}")
        home = _HOMES.get(name)
        found = import_module(f"bagpipe.{name}") if home is None else getattr(import_module(home), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
