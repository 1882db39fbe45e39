"""Whole training runs with several trainers in one process, one step at a time under a seed, or in threads."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bagpipe.build import PlanChoice, Spec, build_loop
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.checkpointing import Checkpointing, Saving, make_facts, with_marks
from bagpipe.config import Config
from bagpipe.layers import bind
from bagpipe.layout import RowLayout
from bagpipe.models import build_model
from bagpipe.optim import Frozen, PerTable, RowOptimizer
from bagpipe.oracle.assign import Assigner
from bagpipe.prepared import PreparedLoader, row_parameters
from bagpipe.reference import Reference
from bagpipe.resuming import check_same_run
from bagpipe.state import State, of_reference, of_store
from bagpipe.store import MemoryStore
from bagpipe.store.views import shared_views
from bagpipe.together import TrainerThreads
from bagpipe.trainer.checkpointer import Periods
from bagpipe.trainer.loop import TrainLoop
from bagpipe.trainer.state import dense_parameters
from harness.explorer import explorer
from harness.flat import prepare
from harness.sabotage import NOTHING
from harness.world import OPTIMIZERS, TABLES, dense_sgd, initial

DESIGNS = ("owned", "partitioned", "replicated", "lrpp")
SMALL = {
    "dlrm": {"bottom": (8,), "top": (8, 6)},
    "wide_deep": {"deep": (8, 6)},
    "deep_cross": {"bottom": (8,), "top": (6,), "cross_rank": 3},
    "deepfm": {"deep": (6, 6)},
}
"""Sizes of dense layers; the published ones would take all of a test's time."""


def small_model(name, tables=TABLES, dim=5):
    """One of the models, its embedding layers on the meta device."""
    return build_model(name, tables, 3, dim, torch.device("meta"), seed=3, **SMALL[name])


@dataclass
class World:
    """What all runs of a test have in common; `reference` and `run` train in it."""

    batches: list[Any]
    optimizer: Any = "adagrad"
    """The name of one of `OPTIMIZERS`, or a function that makes one."""
    model: Any = "wide_deep"
    tables: Any = TABLES
    trainers: int = 2
    assign: str = "contiguous"
    dense: Any = dense_sgd

    def make(self):
        """A model, its features, and the layout of its rows."""
        model = self.model() if callable(self.model) else small_model(self.model, self.tables)
        binding = bind(model, list(self.batches[0].sparse), tables=self.tables)
        rows = OPTIMIZERS[self.optimizer]() if isinstance(self.optimizer, str) else self.optimizer()
        layouts = []
        for number, table in enumerate(binding.tables):
            layers = [layer.name for layer in binding.layers if layer.table == number]
            optimizer = Frozen() if binding.frozen(number) else rows.for_table(table.name, layers)
            layouts.append(RowLayout(table, binding.dims(number), optimizer, initial(table)))
        return model, binding, layouts, rows

    def assigner(self):
        """The one that the configuration names."""
        tables = bind(self.make()[0], list(self.batches[0].sparse), tables=self.tables).tables
        return Assigner(self.assign, self.trainers, 0, [table.features for table in tables])

    def make_reference(self) -> Reference:
        """The ground truth, before its first iteration."""
        assigner = self.assigner()
        assigned = {batch.number: assigner(batch) for batch in self.batches}  # also of those that are not trained
        return Reference(*self.make()[:3], self.dense, self.trainers, lambda batch: assigned[batch.number])

    def reference(self, batches=None) -> State:
        """The ground truth."""
        reference = self.make_reference()
        for batch in self.batches if batches is None else batches:
            reference.step(batch)
        return of_reference(reference)


@dataclass
class Found:
    """What a run has left."""

    state: State
    dense: list[dict[str, torch.Tensor]]
    """The dense parameters of each trainer."""
    losses: list[list[float]]
    results: list[Any]
    stats: list[dict[str, Any]]
    updates: int
    steps: Any = None


@dataclass
class One:
    """One trainer, as a test's loop sees it."""

    rank: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: PreparedLoader
    rows: RowOptimizer | PerTable
    losses: list[float]
    held: Any = None

    @property
    def loop(self) -> TrainLoop:
        """What the loader trains with."""
        return self.loader.loop

    def batches(self):
        """Its batches; held, so that what goes wrong with one of them is told to the others, as by `bagpipe train`."""
        self.held = iter(self.loader)
        return self.held

    def backward(self, batch, scale=1.0):
        """A forward and a backward pass."""
        loss = loss_of(self.model, batch)
        self.optimizer.zero_grad()
        (loss * scale).backward()
        self.losses.append(loss.item())

    def step(self):
        """Dense parameters and rows."""
        self.optimizer.step()

    def train(self, batch):
        """All of an iteration."""
        self.backward(batch)
        self.step()


def loss_of(model, batch):
    """Mean over the samples."""
    return nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)


def plain_loop(one: One):
    """What users write."""
    for batch in one.batches():
        one.train(batch)


def trainer_over(loop: TrainLoop, optimizer, rows) -> One:
    """A trainer whose loop is there already."""
    loader = PreparedLoader(loop, row_parameters(loop.binding, loop.lookups.device), [optimizer], {})
    return One(loop.rank, loop.model, optimizer, loader, rows, [])


def state_of(one: One) -> State:
    """What it has trained so far, as the store has it."""
    return of_store(one.model, [layout.table.name for layout in one.loop.layouts], one.loop.store)


class _Kept(TrainerThreads):
    """Trainers whose loops are saved as a test says."""

    def plan_saving(self, _spec, _checkpoint):
        return self.kept


class Several:
    """Trainers that were made and have not run yet."""

    def __init__(
        self, world: World, together=None, *, loader=None, store=None, accumulate=1, kept=None, sabotage=NOTHING,
        **settings,
    ):  # fmt: skip
        """`together` None: plain threads; `kept` has what `keep_world` takes."""
        sync = {key: settings.pop(key) for key in ("design", "delayed", "moving") if key in settings}
        settings = {"cache": 300, "check": True} | settings
        config = Config(**settings, trainers=world.trainers, assign=world.assign, sync=sync)
        self.world, self.together = world, together
        self.made = [world.make() for _ in range(world.trainers)]
        self.store = store
        # Together looks by itself at what has become ready.
        drivers = None if together is None else [together.driver(rank) for rank in range(world.trainers)]
        self.kept = None if kept is None else keep_world(self.made[0], world.trainers, accumulate, **kept)
        plans = PlanChoice(config.cache, config.lookahead, config.policy, config.policy_options.build())
        loader = world.batches if loader is None else loader

        def open_stores(spec, saving, notify):
            self.store = self.store or (sabotage.store or MemoryStore)(spec.layouts)
            if saving is not None:
                self.store = with_marks(self.store)
            return shared_views(self.store, world.trainers, notify)

        def loop_in(place, made):
            model, binding, layouts, _ = made
            source = place.open_source(loader, accumulate)
            spec = Spec(
                model=model, binding=binding, rows=layouts[0].optimizer, layouts=layouts, plans=plans, source=source,
                accumulate=accumulate, check=config.check, once=True,
            )  # fmt: skip
            return build_loop(spec, place)

        with sabotage.between_the_parts():
            self.trainers = _Kept(
                config, open_stores=open_stores, drivers=drivers, run=None if together is None else together.run
            )
            self.trainers.kept = self.kept
            self.loops = [loop_in(*each) for each in zip(self.trainers.worlds, self.made, strict=True)]
        self.ones = [
            trainer_over(loop, world.dense(list(made[0].parameters())), made[3])
            for loop, made in zip(self.loops, self.made, strict=True)
        ]

    def run(self, loop=plain_loop, before=None) -> Found:
        """Train; the state is read when all are through."""
        states = []

        def train(rank, _):
            one = self.ones[rank]
            one.loader.register_for_checkpointing()
            if before is not None:
                before(one)
            with one.loader, one.loop:
                result = loop(one)
            if rank == 0:
                states.append(state_of(one))
            return result

        results = self.trainers.run(self.loops, train)
        dense = [
            {name: value.detach().clone() for name, value in dense_parameters(one.model).items()} for one in self.ones
        ]
        for rank, parameters in enumerate(dense):
            for name, value in parameters.items():
                same = value.numpy().tobytes() == dense[0][name].numpy().tobytes()
                assert same, f"dense parameter {name} of trainer {rank} differs from trainer 0"
        updates = {layout.optimizer.updates for one in self.ones for layout in one.loop.layouts}
        assert len(updates) == 1, f"optimizers have made {updates} updates"
        return Found(
            states[0], dense, [one.losses for one in self.ones], results,
            [one.loop.stats() for one in self.ones], updates.pop(),
            self.together and self.together.steps,
        )  # fmt: skip


def keep_world(made, trainers, accumulate, directory, every=None, resume=None):
    """Checkpoints of a world in a directory, all of which stay."""
    checkpointing = None if every is None else Checkpointing(directory, every=every, keep=100)
    facts = make_facts(made[2], made[1], checkpointing, trainers=trainers, accumulate=accumulate)
    point = START
    if resume is not None:
        checkpoint = Checkpoints(directory).open(resume)
        check_same_run(checkpoint, facts)
        point = ResumePoint.of(checkpoint)
    return Saving(facts, directory, Periods(every), 100, point)


def run(world, seed=0, eagerness=2.0, last=(), loop=plain_loop, before=None, **settings) -> Found:
    """A whole run under a seeded scheduler."""
    return Several(world, explorer(seed, eagerness, last, together=True, deadline_s=60.0), **settings).run(loop, before)


def run_alone(world, driver=None, loop=plain_loop, sabotage=NOTHING, **options) -> Found:
    """The same with one trainer, on its own."""
    model, _, _, rows = world.make()
    options = {"cache": 300, "check": True, "store": sabotage.store or "memory"} | options
    with sabotage.between_the_parts():
        one = One(
            0, *prepare(
                model, world.dense(list(model.parameters())), world.batches, rows, features=world.tables,
                initial=initial, driver=driver or explorer(0), **options,
            ), rows, [],
        )  # fmt: skip
    with closing(one.loop.store), one.loader, one.loop:
        result = loop(one)
        one.loader.close()
        state = state_of(one)
    return Found(state, [], [one.losses], [result], [one.loop.stats()], rows.updates)
