"""Train PyTorch recommendation models whose embedding tables do not fit, with exactly the result of plain training."""

from bagpipe._version import __version__

__all__ = ["__version__"]
