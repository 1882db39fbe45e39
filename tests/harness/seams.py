"""What the net needs of the inside, under names of its own: when the inside moves, this file changes and the net stays.

A pair such as `SAVE` is a place where a test may put something of its own: `monkeypatch.setattr(*SAVE, mine)`.
"""

from __future__ import annotations

from bagpipe import prepared as preparing
from bagpipe.checkpoint import export as exporting
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.export import export
from bagpipe.checkpoint.manifest import InitialEntry, RunFacts
from bagpipe.checkpoint.point import ResumePoint
from bagpipe.checkpoint.tree import tree_parts
from bagpipe.cluster.keeper import children_of
from bagpipe.config import load_config, parse_config
from bagpipe.initial import Given
from bagpipe.job import open_job, prepare
from bagpipe.layers import bind
from bagpipe.layout import RowLayout
from bagpipe.models.base import unbounded_rows
from bagpipe.optim import RowOptimizer
from bagpipe.oracle.assign import Assigner
from bagpipe.reference import Reference
from bagpipe.resuming import find_run, holding, note_config, open_run
from bagpipe.store import MemoryStore
from bagpipe.store.versioned import VersionedStore
from bagpipe.trainer.stages import Threads
from bagpipe.training import train
from bagpipe.types import Batch

__all__ = [
    "DEFINED",
    "EXAMINE",
    "EXPORTED_BLOCKS",
    "EXPORTED_BLOCK_ROWS",
    "GIVES_A_BATCH",
    "HOMES",
    "LIGHT_MODULES",
    "SAVE",
    "SERVES_AND_STOPS",
    "STATE_BYTES_MAX",
    "Assigner",
    "Checkpoints",
    "MemoryStore",
    "ResumePoint",
    "begun_run",
    "checkpoint_of_first_values",
    "children_of",
    "find_run",
    "given_reference",
    "prepared",
    "resumed",
    "threads",
    "trained",
    "unbounded_rows",
]

SAVE = (VersionedStore, "save")
"""Writes the rows of a checkpoint: (store, done, ...)."""
STATE_BYTES_MAX = (preparing, "WEIGHT_BYTES_MAX")
"""The size from which on an optimizer's state of a layer is no part of its state_dict."""
EXPORTED_BLOCKS = (exporting.ExportedTable, "blocks")
"""The blocks of a table's rows, as an export writes them."""
EXPORTED_BLOCK_ROWS = (exporting, "ROWS_PER_BLOCK")
EXAMINE = "bagpipe.doctor.examine"
"""What the shortest command calls."""
DEFINED = {"export": export, "Batch": Batch}
"""Public names, and what they are names of."""
HOMES = "bagpipe.checkpoint.export, bagpipe.prepared, bagpipe.script, bagpipe.training"
"""Modules whose import must not hide a public name."""
TRAINING_MODULE = "bagpipe.trainer.loop"
"""Loaded by whoever trains."""
LIGHT_MODULES = (
    *("bagpipe.cluster.processor_role", "bagpipe.cluster.server_role", "bagpipe.data.processors.child"),
    *("bagpipe.server.local", "bagpipe.server.process"),
)
"""Those of processes that never train."""
SERVES_AND_STOPS = """
import threading
from bagpipe.server.process import ServerOptions, serve

stop = threading.Event()
serve(ServerOptions(store="{store}"), None, lambda ready: stop.set(), stop)
"""
GIVES_A_BATCH = """
from bagpipe.data.described import describe
from bagpipe.data.generator import Generated
from bagpipe.data.presets import find_preset
from bagpipe.data.service import DataOrder, DataProcessorService
from bagpipe.wire.client import Client
from bagpipe.wire.listener import on_socket
from bagpipe.wire.plan_messages import GetBatch, GotBatch
from bagpipe.wire.stream import SocketNetwork

order = DataOrder(describe(Generated(find_preset("tiny"), 100, 0)), 10, 20, seed=1)
service = DataProcessorService(on_socket("127.0.0.1:0"), order, run=bytes(16))
client = Client(SocketNetwork(), service.start(), "it", run=bytes(16))
assert isinstance(client.call(GetBatch(3, order.fingerprint())).body, GotBatch)
client.close()
service.close()
"""


def threads(deadline_s):
    """A driver of plain threads that wait no longer than this."""
    return Threads(deadline_s)


def begun_run(directory, settings):
    """A run that is going on: a context."""
    directory.mkdir()
    note_config(directory, load_config(None, settings))
    return holding(directory)


def prepared(settings, directory):
    """A run of `bagpipe train` that has not begun."""
    return prepare(parse_config(settings), directory)


def trained(job, report=lambda _done, _note: None, checkpoint=None):
    """The summary of a run, from its beginning or from a checkpoint."""
    return train(job, report, checkpoint)


def resumed(run_dir, settings):
    """A run that is gone on with under other settings, and the checkpoint that it goes on from."""
    found = open_run(run_dir, settings)
    return open_job(found.config, found.directory), found.point.checkpoint


def checkpoint_of_first_values(pending, table, layer, value):
    """Write a checkpoint of one table of which no row was trained."""
    import msgspec

    initial = (InitialEntry(kind="constant", value=value),)
    pending.write_blob("trainer-0", *tree_parts({"parameters": {}, "buffers": {}}))
    pending.commit(RunFacts(tables=(msgspec.structs.replace(table, layers=(layer,), initial=initial),)))


def given_reference(model, features, weights, rows: RowOptimizer, dense, trainers):
    """The reference for a model whose tables begin with these weights, by the name of the table."""
    binding = bind(model, features)
    layouts = [
        RowLayout(table, binding.dims(number), rows, Given([weights[table.name]]))
        for number, table in enumerate(binding.tables)
    ]
    return Reference(model, binding, layouts, dense, trainers=trainers)
