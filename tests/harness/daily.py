"""Two days of data whose tables grow from one to the next, and the plain reference trained on one after the other."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch

from bagpipe.config import parse_config
from bagpipe.data import generated, write
from bagpipe.data.presets import find_preset
from bagpipe.job import dense_optimizer, prepare
from bagpipe.oracle.assign import Assigner
from bagpipe.reference import Reference
from bagpipe.state import of_reference
from bagpipe.table import Table

SETTINGS = {
    "model": {"name": "deepfm", "dim": 3},
    "row_optimizer": {"name": "adam", "lr": 0.02},
    "dense_optimizer": {"name": "adam", "lr": 0.01},
    "batch_size": 24,
    "cache": 800,
    "threads": 1,
}
"""Two vectors a row, with moments; the step that both optimizers have counted must go on."""
ROWS = {1: (300, 200, 12), 2: (420, 200, 20)}
"""Of `user`, `item` and `city` on each day; `device` takes any id."""
DEVICES = {1: 400, 2: 900}


def write_days(path, samples=260):
    """The data of both days, in directories `1` and `2`."""
    tiny = find_preset("tiny")
    for day, (user, item, city) in ROWS.items():
        tables = (Table("user", user), Table("item", item, ("item", "recent")), Table("city", city), Table("device"))
        preset = replace(tiny, tables=tables, population={"device": DEVICES[day]})
        write(generated(preset, samples, seed=day), path / str(day))


def day_job(data, run_dir, day, **settings):
    """The run of a day; `settings` are laid over the usual ones."""
    own = SETTINGS | {"data": {"path": str(data / str(day))}, "seed": day} | settings
    return prepare(parse_config(own), run_dir)


def trained_reference(job, before=None):
    """The plain reference after all batches of a job; with `before` it begins with the state of that one."""
    model, binding, layouts = job.model()
    config = job.config
    assign = Assigner(config.assign, config.trainers, config.seed, [table.features for table in binding.tables])
    reference = Reference(model, binding, layouts, dense_optimizer(config.dense_optimizer), config.trainers, assign)
    if before is not None:
        for rows, earlier in zip(reference.tables, before.tables, strict=True):
            rows.written = {row: values.copy() for row, values in earlier.written.items()}
        with torch.no_grad():
            for mine, theirs in zip(reference.dense, before.dense, strict=True):
                mine.copy_(theirs)
        state = deepcopy(before.dense_optimizer.state_dict()["state"])  # which would be shared
        groups = reference.dense_optimizer.state_dict()["param_groups"]
        reference.dense_optimizer.load_state_dict({"state": state, "param_groups": groups})
        reference.iteration = before.iteration
    for batch in job.batches():
        reference.step(batch)
    return reference


def state_of(reference):
    """Everything that it has trained, to be compared."""
    return of_reference(reference)
