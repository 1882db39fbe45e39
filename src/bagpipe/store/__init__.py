"""Where rows live, behind one interface."""

from bagpipe.store.base import RowSource, Store, StoreStats
from bagpipe.store.local import MemoryStore
from bagpipe.store.mapped import MappedStore

__all__ = ["MappedStore", "MemoryStore", "RowSource", "Store", "StoreStats"]
