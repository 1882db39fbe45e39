"""Data processors: processes that read, shuffle and batch, in an order that their number and their deaths don't change.

Batches come through shared memory, everything else as short messages; nothing is pickled.
"""

from bagpipe.data.processors.pool import read

__all__ = ["read"]
