"""What golden digests are taken of: runs through public commands, with settings as they were named at the start.

An entry is a name and what is run: `train` with these settings, the `script`, a `launch`, or the script killed with
SIGKILL in mid-training and started again (`killed`). The data is data.parquet, in stored order; one entry shuffles.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

BASE = ("batch_size=101", "model.dim=4", "threads=1", "cache=8MB")
"""A small cache: runs follow each other in one process, which keeps the memory that they free."""
MODELS = ("dlrm", "wide_deep", "deep_cross", "deepfm")
OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamw")
POLICIES = (
    "lookahead", "belady", "scratchpipe", "windowed", "frequency", "static", "lru", "lfu", "nocache", "ideal",
)  # fmt: skip
DESIGNS = ("owned", "partitioned", "replicated", "lrpp")
ASSIGNMENTS = ((2, "contiguous"), (3, "round_robin"), (2, "aware"))
OTHERS = (
    ("store=mapped",),
    ("servers=2",),
    ("data.processes=1",),
    ("checkpoint.every=4",),
    ("check=true",),
    ("data.shuffle=true", "epochs=2"),
    ("lookahead=3", "cache=900"),
)
QUICK = 3
"""Every so many entries of `train` are in the part that CI runs."""


class Case(NamedTuple):
    """One entry."""

    name: str
    kind: str
    settings: tuple[str, ...]


def _train(*settings: str) -> Case:
    return Case(" ".join(settings), "train", settings)


TRAIN = [
    *(_train(f"model.name={model}", f"row_optimizer.name={name}") for model, name in product(MODELS, OPTIMIZERS)),
    *(
        _train("model.name=wide_deep", f"policy={policy}", "cache=1500", f"lookahead={1 if policy == 'nocache' else 4}")
        for policy in POLICIES
    ),
    *(
        _train("model.name=wide_deep", f"trainers={number}", f"assign={assign}", f"sync.design={design}")
        for design, (number, assign) in product(DESIGNS, ASSIGNMENTS)
    ),
    *(_train("model.name=wide_deep", *settings) for settings in OTHERS),
]
WHOLE = [
    *TRAIN,
    Case("script", "script", ()),
    Case("script killed and resumed", "killed", ()),
    Case("launch", "launch", ("model.name=wide_deep", "trainers=2", "servers=2")),
]
PART = [*TRAIN[::QUICK], Case("script", "script", ())]
