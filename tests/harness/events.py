"""Training loops in which something else happens at some batches, and what must be seen then."""

from __future__ import annotations

import torch

from harness.world import make_batches

OTHERS = make_batches(2, seed=99)
"""For evaluation."""


def evaluated(model, batches):
    """The bits of what a model says of other batches, in the middle of training."""
    with torch.no_grad():
        return [model(other.dense, other.sparse).numpy().tobytes() for other in batches.evaluate(OTHERS)]


def saved(batches):
    """The bits of all rows in a state dict, by table and id."""
    return {
        name: dict(zip(part["ids"].tolist(), [row.numpy().tobytes() for row in part["rows"]], strict=True))
        for name, part in batches.state_dict()["tables"].items()
        if len(part["ids"])
    }


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
        for number, batch in enumerate(one.batches):
            event = events.get(number)
            if event == "evaluate":
                seen[number] = evaluated(one.model, one.batches)
            elif event == "save":
                seen[number] = saved(one.batches)
            elif event == "barrier":
                one.batches.barrier()
            one.backward(batch)
            if event == "skip":
                one.batches.zero_grad()
                continue
            if event == "norm":
                assert one.batches.grad_norm() > 0
            one.step()
            if event == "barrier after":
                one.batches.barrier()
        return seen

    return loop
