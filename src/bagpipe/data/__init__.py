"""Training data: shards on disk and calibrated generated data sets, read in an order that no thread can change."""

from bagpipe.data.dataset import Dataset, IndexedDataset
from bagpipe.data.described import describe, open_described
from bagpipe.data.frames import from_frame
from bagpipe.data.generator import Generated, best_auc, generated
from bagpipe.data.loader import Loader
from bagpipe.data.manifest import Manifest
from bagpipe.data.presets import PRESETS, Dials, Feature, Preset, find_preset
from bagpipe.data.shards import Shards
from bagpipe.data.writer import ShardWriter, write

__all__ = [
    "PRESETS",
    "Dataset",
    "Dials",
    "Feature",
    "Generated",
    "IndexedDataset",
    "Loader",
    "Manifest",
    "Preset",
    "ShardWriter",
    "Shards",
    "best_auc",
    "describe",
    "find_preset",
    "from_frame",
    "generated",
    "open_described",
    "write",
]
