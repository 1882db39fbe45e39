"""A small run that can be stopped after any iteration and continued elsewhere, and everything that it has changed."""

from __future__ import annotations

import io
from itertools import islice

import torch
from torch import nn

import bagpipe
from bagpipe.data import generated
from bagpipe.initial import Uniform
from bagpipe.models import build_model
from bagpipe.schedules import Cosine
from bagpipe.state import of_store

SAMPLES, BATCH, EPOCHS = 70, 32, 3
"""Three batches an epoch, the last one of 6 samples."""
TABLES = generated("tiny", 1).tables


class Session:
    """One process's worth of training: a new model, new optimizers, a new loader."""

    def __init__(self, loader, saved=None, **options):
        self.model = build_model("wide_deep", TABLES, 4, 4, torch.device("meta"), seed=3)
        self.rows = bagpipe.optim.Adam(Cosine(0.05, 12))
        options = {"cache": 500, "check": True, "initial": lambda table: Uniform(7, table.name, 0.5)} | options
        self.loop = bagpipe.accelerate(self.model, loader, self.rows, tables=TABLES, **options)
        self.dense = torch.optim.Adam(self.model.parameters(), lr=0.02)
        if saved is not None:
            state = torch.load(io.BytesIO(saved), weights_only=True)
            self.loop.load_state_dict(state["rows"])
            self.dense.load_state_dict(state["dense_optimizer"])
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(state["dense"][name])

    def train(self, iterations=None):
        """Train to the end, or so many iterations; what would be saved after each."""
        saved = []
        with self.loop:
            batches = iter(self.loop) if iterations is None else islice(self.loop, iterations)
            for batch in batches:
                loss = nn.functional.binary_cross_entropy_with_logits(
                    self.model(batch.dense, batch.sparse), batch.labels
                )
                loss.backward()
                if self.loop.step_due:
                    self.dense.step()
                    self.rows.step()
                    self.dense.zero_grad()
                    saved.append(self.save())
        return saved

    def save(self):
        file = io.BytesIO()
        dense = {name: value.detach() for name, value in self.model.named_parameters()}
        state = {"rows": self.loop.state_dict(), "dense": dense, "dense_optimizer": self.dense.state_dict()}
        torch.save(state, file)
        return file.getvalue()

    def end(self):
        """Everything that training has changed, to be compared."""
        names = [layout.table.name for layout in self.loop.layouts]
        state = of_store(self.model, names, self.loop.store)
        moments = [
            value.numpy().tobytes() for part in self.dense.state_dict()["state"].values() for value in part.values()
        ]
        self.loop.close()
        self.loop.store.close()
        return state, moments, self.rows.state_dict()


def assert_same_end(expected, found):
    """Rows with their state, dense parameters, both optimizers: equal to the last bit."""
    differing = expected[0].differing(found[0])
    assert not differing, f"{len(differing)} differ, first {differing[:3]}"
    assert expected[1:] == found[1:]
