"""Training loops in which something else happens at some batches."""

from __future__ import annotations

import torch

from harness.world import make_batches

OTHERS = make_batches(2, seed=99)
"""For evaluation."""


def train_with_events(events):
    """A loop in which something happens at some batches, on all trainers."""

    def loop(one):
        for number, batch in enumerate(one.batches):
            event = events.get(number)
            if event == "evaluate":
                with torch.no_grad():
                    for other in one.batches.evaluate(OTHERS):
                        one.model(other.dense, other.sparse)
            elif event == "save":
                one.batches.state_dict()
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

    return loop
