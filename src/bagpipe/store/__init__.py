"""Where rows live, behind one interface."""

from bagpipe.store.base import RowSource, Store, StoreStats
from bagpipe.store.mapped import MappedStore
from bagpipe.store.memory import MemoryStore

__all__ = ["MappedStore", "MemoryStore", "RowSource", "Store", "StoreStats"]
