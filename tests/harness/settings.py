"""Settings at random, the same for a number in every run: each value of each setting comes about equally often."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from bagpipe.policies import POLICIES, PolicyOptions
from bagpipe.reference import Reference
from bagpipe.state import of_reference
from bagpipe.store import MappedStore
from bagpipe.trainer.stages import Threads
from harness.explorer import FETCHES, INSERTS, LOOP, SYNCS, WRITES_BACK, explorer
from harness.sabotage import NOTHING, Sabotage
from harness.trainers import DESIGNS, Several, World, loss_of, run_alone
from harness.world import OPTIMIZERS, make_batches

CHOICES: dict[str, tuple[Any, ...]] = {
    "model": ("dlrm", "wide_deep", "deep_cross", "deepfm"),
    "optimizer": tuple(OPTIMIZERS),
    "policy": tuple(POLICIES),
    "lookahead": (1, 2, 3, 7, 200, "auto"),
    "cache": ("tight", "tight", "roomy", "bytes"),
    "trainers": (1, 1, 2, 3, 4),
    "design": DESIGNS,
    "delayed": (True, False),
    "moving": (True, False),
    "assign": ("contiguous", "round_robin", "aware"),
    "accumulate": (1, 1, 1, 2, 3),
    "store": ("memory", "mapped"),
    "check": (True, True, False),
    "oracles": (1, 1, 2),
    "pipelined": (True, True, False),
    "replacement": ("lru", "lfu", "random"),
    "threads": (1, 2),
    "depth": (1, 2, 5),
    "size": (1, 5, 6),
    "data": (0, 1, 2),
    "schedule": ("seeded", "seeded", "threads"),
    "eagerness": (0.0, 0.5, 2.0, 20.0),
    "last": ((), (), (WRITES_BACK,), (INSERTS,), FETCHES, (SYNCS,), ((0, LOOP),), ((0, SYNCS),), ((1, WRITES_BACK),)),
}
"""Rows are in the process that trains; servers have seeds of their own in tests/faults."""


def settings(number: int) -> dict[str, Any]:
    """Of so many numbers as a setting has values each has another one."""
    chosen = {}
    for name, values in CHOICES.items():
        order = list(values)
        random.Random(f"{name} {number // len(values)}").shuffle(order)
        chosen[name] = order[number % len(values)]
    if chosen["policy"] == "nocache":
        chosen["lookahead"] = "auto"
    if chosen["policy"] == "ideal":
        chosen["cache"] = "all"
    return chosen


def world_of(chosen) -> World:
    """What is trained, and on what."""
    batches = make_batches(9, size=max(chosen["size"], chosen["trainers"]), seed=chosen["data"], last=2)
    return World(
        batches, chosen["optimizer"], chosen["model"], trainers=chosen["trainers"],
        assign=chosen["assign"] if chosen["trainers"] > 1 else "contiguous",
    )  # fmt: skip


def accumulating(one):
    """What users write, where an iteration may have several batches."""
    one.optimizer.zero_grad()
    for batch in one.batches():
        loss = nn.functional.binary_cross_entropy_with_logits(one.model(batch.dense, batch.sparse), batch.labels)
        (loss if len(batch) else loss * 0).backward()
        if one.loader.step_due:
            one.step()
            one.optimizer.zero_grad()


def train(chosen, number: int):
    """What bagpipe makes of them, as rows and dense parameters."""
    world, several = world_of(chosen), chosen["trainers"] > 1
    tight = (40 if several else 60) * chosen["accumulate"] * chosen["oracles"]
    options = {
        "sample": 5, "oracles": chosen["oracles"], "pipelined": chosen["pipelined"],
        "replacement": chosen["replacement"], "seed": number,
    }  # fmt: skip
    common = {
        "cache": {"tight": tight, "roomy": 300, "bytes": "1MB", "all": 10_000}[chosen["cache"]],
        "policy": chosen["policy"], "lookahead": chosen["lookahead"], "check": chosen["check"],
        "accumulate": chosen["accumulate"],
    }  # fmt: skip
    is_seeded = chosen["schedule"] == "seeded"
    of_one = tuple(each for each in chosen["last"] if isinstance(each, str))
    if not several:
        driver = explorer(number, chosen["eagerness"], of_one) if is_seeded else Threads(60)
        return run_alone(
            world, driver, accumulating, policy_options=PolicyOptions(**options), store=chosen["store"],
            depth=chosen["depth"], threads=chosen["threads"], **common,
        ).state  # fmt: skip
    together = explorer(number, chosen["eagerness"], chosen["last"], together=True, deadline_s=60.0)
    return Several(
        world, together if is_seeded else None, policy_options=options,
        sabotage=Sabotage(store=MappedStore) if chosen["store"] == "mapped" else NOTHING,
        design=chosen["design"], delayed=chosen["delayed"], moving=chosen["moving"], **common,
    ).run(accumulating).state  # fmt: skip


EXPECTED: dict[Any, Any] = {}


def expected(chosen):
    """What the reference makes of them; of several trainers who accumulate, what the plainest settings make of them."""
    names = ("model", "optimizer", "trainers", "assign", "accumulate", "size", "data")
    key = tuple(chosen[name] for name in names)
    if key not in EXPECTED:
        world = world_of(chosen)
        if chosen["accumulate"] == 1:
            EXPECTED[key] = world.reference()
        elif chosen["trainers"] == 1:
            EXPECTED[key] = accumulated(world, chosen["accumulate"])
        else:
            plain = {
                "policy": "ideal", "lookahead": 1, "cache": "all", "design": "replicated", "delayed": False,
                "moving": False, "store": "memory", "check": True, "oracles": 1, "pipelined": False,
                "schedule": "seeded", "eagerness": 2.0, "last": (),
            }  # fmt: skip
            EXPECTED[key] = train(chosen | plain, 0)
    return EXPECTED[key]


def accumulated(world: World, several: int):
    """The ground truth of one trainer whose iterations have several batches: their gradients are added up, in order."""
    reference = world.make_reference()
    for start in range(0, len(world.batches), several):
        _step(reference, world.batches[start : start + several])
    return of_reference(reference)


def _step(reference: Reference, batches) -> None:
    reference.model.zero_grad(set_to_none=True)
    for lookup in reference.lookups:
        lookup.calls.clear()
    for batch in batches:
        torch.autograd.backward(loss_of(reference.model, batch))
    if reference.dense_optimizer is not None:
        reference.dense_optimizer.step()
    for table, store in enumerate(reference.tables):
        named = {
            name: SimpleNamespace(values=torch.cat([batch.sparse[name].values.reshape(-1) for batch in batches]))
            for name in reference.binding.tables[table].features
        }
        # Look-ups were noted in order, those of later batches behind.
        ids, grads = reference._row_gradients(table, SimpleNamespace(sparse=named))
        values = store.read(ids)
        store.layout.optimizer.update(values, grads, store.layout.dims, reference.iteration + 1)
        store.write(ids, values)
    reference.iteration += 1


def difference(number: int) -> str:
    """What is not as expected, with the settings; empty: nothing."""
    chosen = settings(number)
    differing = expected(chosen).differing(train(chosen, number))
    return f"{len(differing)} differ, first {differing[:3]}: {chosen}" if differing else ""


def spread(numbers) -> dict[str, set[Any]]:
    """Which values come."""
    return {name: {settings(number)[name] for number in numbers} for name in CHOICES}
