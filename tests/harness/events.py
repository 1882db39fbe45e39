"""Training loops in which something else happens at some batches, and what must be seen then."""

from __future__ import annotations

import torch

from harness.world import make_batches

OTHERS = make_batches(2, seed=99)
"""For evaluation."""


def evaluated(model, others=OTHERS):
    """The bits of what a model says of other batches, in the middle of training."""
    with torch.no_grad():
        return [model(other.dense, other.sparse).numpy().tobytes() for other in others]


def written(loop):
    """The bits of all rows ever written, by table and id."""
    loop.flush()
    found = {}
    for number, layout in enumerate(loop.layouts):
        for ids, rows in loop.touched_rows(number):
            found.setdefault(layout.table.name, {}).update(
                zip(ids.tolist(), [row.tobytes() for row in rows], strict=True)
            )
    return found


def expected_of(reference, batches, events):
    """Train the reference, but for batches that are skipped; what is to be seen at each event that shows something."""
    seen = {}
    for number, batch in enumerate(batches):
        event = events.get(number)
        if event == "evaluate":
            seen[number] = [reference.predict(other).numpy().tobytes() for other in OTHERS]
        elif event == "save":
            seen[number] = {
                table.layout.table.name: {row: values.tobytes() for row, values in table.written.items()}
                for table in reference.tables
                if table.written
            }
        if event != "skip":
            reference.step(batch)
    return seen


def train_with_events(events):
    """A loop in which something happens at some batches, on all trainers; it returns what was seen."""

    def loop(one):
        seen = {}
        for number, batch in enumerate(one.batches()):
            event = events.get(number)
            if event == "evaluate":
                one.loader.flush()
                seen[number] = evaluated(one.model)
            elif event == "save":
                seen[number] = written(one.loop)
            elif event == "barrier":
                one.loader.flush()
            one.backward(batch)
            if event == "skip":
                one.optimizer.zero_grad()
                continue
            if event == "norm":
                assert one.loop.grad_norm() > 0
            one.step()
            if event == "barrier after":
                one.loader.flush()
        return seen

    return loop
