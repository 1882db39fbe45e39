"""Train PyTorch recommendation models whose embedding tables do not fit, with exactly the result of plain training."""

from bagpipe import errors, initial, optim, schedules
from bagpipe._version import __version__
from bagpipe.api import accelerate
from bagpipe.errors import BagpipeError
from bagpipe.export import export
from bagpipe.trainer.batches import Batches
from bagpipe.trainer.clip import clip_grad_norm_
from bagpipe.types import Batch, Ids, Table

__all__ = [
    "BagpipeError",
    "Batch",
    "Batches",
    "Ids",
    "Table",
    "__version__",
    "accelerate",
    "clip_grad_norm_",
    "errors",
    "export",
    "initial",
    "optim",
    "schedules",
]
