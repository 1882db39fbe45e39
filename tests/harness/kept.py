"""A small run that draws at random, has buffers and a schedule, and is kept by checkpoints; and all that it changes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import bagpipe
from bagpipe.data import Loader, generated
from bagpipe.initial import Uniform
from bagpipe.models import build_model
from bagpipe.state import of_store
from harness.flat import prepare

SAMPLES, BATCH, EPOCHS = 70, 32, 3
"""Three batches an epoch, the last one of 6 samples: 9 in all."""
DATA = generated("tiny", SAMPLES)
STORED = list(DATA.batches(BATCH, epochs=EPOCHS, seed=1))
ROWS = {
    "sgd": lambda: bagpipe.optim.SGD(0.1),
    "adagrad": lambda: bagpipe.optim.Adagrad(0.1),
    "adam": lambda: bagpipe.optim.Adam(bagpipe.schedules.Cosine(0.05, 12)),
}


def loader():
    """Another order each epoch."""
    return Loader(DATA, BATCH, epochs=EPOCHS, seed=1)


class Noisy(nn.Module):
    """A model that depends on all that is not a parameter: buffers, and every generator there is."""

    def __init__(self, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.inner = build_model("wide_deep", DATA.tables, 4, 4, torch.device("meta"), seed=seed)
        self.own = torch.Generator().manual_seed(seed)

    def forward(self, dense, sparse):
        """Noise on what is dense."""
        drawn = random.random() + np.random.random()  # noqa: NPY002
        factor = 1 + 0.1 * (drawn + torch.rand((), generator=self.own).item())
        return self.inner(self.drop(self.norm(dense)) * factor, sparse)


class Run:
    """One process's worth of training: a new model, a new optimizer, a new loader, generators as at a start."""

    def __init__(
        self,
        rows="adam",
        seed=3,
        register=True,
        make_loader=loader,
        model=Noisy,
        lr=0.02,
        dense=torch.optim.Adam,
        parameters=nn.Module.parameters,
        epochs=1,
        checkpoint=None,
        resume=None,
        **options,
    ):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        self.rows, self.epochs = ROWS[rows](), epochs
        own = model(seed)
        optimizer = dense(parameters(own), lr=lr)
        options = {
            "cache": 500, "features": DATA.tables, "initial": lambda table: Uniform(7 + seed, table.name, 0.5),
            "checkpoint": resuming(checkpoint, resume),
        } | options  # fmt: skip
        self.model, self.optimizer, self.loader = prepare(own, optimizer, make_loader(), self.rows, **options)
        self.loop = self.loader.loop
        # The rate of rows may follow a schedule of its own.
        of_groups = [decay, unchanged if callable(self.rows.lr) else decay]
        self.scheduler = torch.optim.lr_scheduler.MultiplicativeLR(self.optimizer, of_groups)
        if register:
            self.loader.register_for_checkpointing(scheduler=self.scheduler, own=self.model.own)

    def train(self, stop=None, error=None):
        """Train to the end, or until so many batches were seen, or fail then; self."""
        number = 0
        for _ in range(self.loader.epoch, self.epochs):
            for batch in self.loader:
                number += 1
                loss = nn.functional.binary_cross_entropy_with_logits(
                    self.model(batch.dense, batch.sparse), batch.labels
                )
                loss.backward()
                if self.loader.step_due:
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if number == stop and error is not None:
                    raise error
                if number == stop:
                    return self
        return self

    def end(self):
        """Everything that training has changed, to be compared; also where each generator is."""
        self.loader.close()
        names = [layout.table.name for layout in self.loop.layouts]
        state = of_store(self.model, names, self.loop.store)
        rest = [value.numpy().tobytes() for value in self.model.buffers()]
        for part in self.optimizer.dense_state()["state"].values():
            rest += [value.numpy().tobytes() for value in part.values()]
        rest += [str(self.rows.state_dict()), str(self.scheduler.state_dict()), str(self.loop.done)]
        rest += [random.random(), np.random.random()]  # noqa: NPY002
        rest += [torch.rand(()).item(), torch.rand((), generator=self.model.own).item()]
        self.loop.store.close()
        return state, rest


def resuming(checkpoint, resume):
    """What was asked for, going on from there; without a directory nothing is saved."""
    if resume is None:
        return checkpoint
    return replace(checkpoint or bagpipe.Checkpointing(None, resume=resume), resume=resume)


def decay(done):
    """After some iterations, once each."""
    return 0.7 if done in (2, 4, 6) else 1.0


def unchanged(_):
    """At any time."""
    return 1.0


def every(directory, period=1, **options):
    """Checkpoints, all of which stay."""
    return bagpipe.Checkpointing(directory, **({"every": period, "keep": 100} | options))


def undisturbed(**options):
    """What must come out."""
    return Run(**options).train().end()


def assert_same_end(expected, found):
    """Rows with their state, dense parameters, buffers, optimizers, generators: equal to the last bit."""
    differing = expected[0].differing(found[0])
    assert not differing, f"{len(differing)} differ, first {differing[:3]}"
    assert expected[1] == found[1]
