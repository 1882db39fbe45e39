"""A training run: `bagpipe train` and `bagpipe verify` are thin layers over it.

The same job is trained by the reference or by the configured system, and both must end with the same
`parameters_sha256` (I1).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from torch import nn

from bagpipe.api import accelerate
from bagpipe.job import Job, dense_optimizer
from bagpipe.layout import RowLayout
from bagpipe.metrics import Metrics
from bagpipe.opening import OpenStore, memory_of_files, open_rows
from bagpipe.oracle.assign import Assigner
from bagpipe.reference import Reference
from bagpipe.results import (
    Clock,
    Report,
    Summary,
    evaluate,
    evaluate_accelerated,
    joined_summary,
    metrics_summary,
    write_summary,
)
from bagpipe.server.local import open_store, open_stores
from bagpipe.state import State, of_reference, of_store
from bagpipe.store import Store
from bagpipe.store.views import shared_views
from bagpipe.together import Trainers
from bagpipe.trainer.batches import Batches
from bagpipe.trainer.remote_plans import RemotePlans, remote_batches
from bagpipe.trainer.stages import Driver
from bagpipe.trainer.sync import Groups, Peers
from bagpipe.types import Batch


def train_reference(job: Job, report: Report) -> tuple[State, Summary]:
    """Train with the reference, on the trainers that the job asks for."""
    model, binding, layouts = job.model()
    config = job.config
    dense = dense_optimizer(config.dense_optimizer)
    assign = Assigner(config.assign, config.trainers, config.seed, [table.features for table in binding.tables])
    reference = Reference(model, binding, layouts, dense, config.trainers, assign)
    untrained = evaluate(job, reference.predict)
    clock = Clock()
    for batch in job.batches():
        clock.loss = reference.step(batch)
        clock.tick(batch, report)
    clock.stop()
    trained = evaluate(job, reference.predict)
    return of_reference(reference), clock.summary() | metrics_summary(trained, untrained)


def train_accelerated(job: Job, report: Report) -> tuple[State, Summary]:
    """Train with the configured system."""
    if job.config.trainers > 1:
        return train_together(job, report)
    with closing(job.batches()) as reading:  # also when training never begins: its threads must not stay
        return _train_accelerated(job, reading, report)


def _train_accelerated(job: Job, reading: Generator[Batch, None, None], report: Report) -> tuple[State, Summary]:
    config = job.config
    model, _, layouts = job.model()
    optimizer = layouts[0].optimizer
    initials = {layout.table.name: layout.initial for layout in layouts}
    batches = accelerate(
        model,
        reading,
        optimizer,
        cache=config.cache,
        lookahead=config.lookahead,
        policy=config.policy,
        policy_options=config.policy_options.build(),
        store=_store(job),
        store_memory=config.store_memory if not config.servers else None,
        tables=job.train.tables,
        initial=lambda table: initials[table.name],
        check=config.check,
    )
    with closing(batches.store):
        state, summary = train_over(job, model, layouts, batches, report)
    assert state is not None
    del summary["last_samples"]
    return state, summary


def train_together(job: Job, report: Report) -> tuple[State, Summary]:
    """The same with several trainers, which are threads of this process."""
    config = job.config
    made = [job.model() for _ in range(config.trainers)]
    with closing(job.batches()) as reading:
        trainers = Trainers(config, made, reading, partial(open_views, job))
        reports = [report, *[_unheard] * (config.trainers - 1)]
        ended = trainers.run(lambda rank, batches: train_over(job, *made[rank][::2], batches, reports[rank], rank))
    state = ended[0][0]
    assert state is not None
    return state, joined_summary([summary for _, summary in ended])


def _unheard(_done: int, _note: str) -> None:
    """What trainers beside the first one say in one process."""


def open_views(job: Job, layouts: Sequence[RowLayout], notify: Sequence[Callable[[], None]]) -> list[Store]:
    """The rows of a job, as each of its trainers sees them."""
    config = job.config
    if config.servers:
        return [*open_stores(config, layouts, job.run_dir, config.trainers)]
    where = _store(job)
    store = open_rows(where, layouts, memory_of_files(where, config.store_memory))
    return [*shared_views(store, config.trainers, notify)]


def _store(job: Job) -> str | Path | OpenStore:
    """Where the rows of a job live."""
    if job.config.servers:
        return lambda layouts: open_store(job.config, layouts, job.run_dir)
    return "memory" if job.config.store == "memory" else job.run_dir / "rows"


def train_over(
    job: Job, model: nn.Module, layouts: list[RowLayout], batches: Batches, report: Report, rank: int = 0
) -> tuple[State | None, Summary]:
    """Train a model whose embedding layers are swapped, over the batches of the job.

    Of several trainers all call it, and the first one evaluates and has a state in the end.
    """
    optimizer = layouts[0].optimizer
    dense = dense_optimizer(job.config.dense_optimizer)(list(model.parameters()))
    loss_fn = nn.BCEWithLogitsLoss()
    untrained = trained = Metrics()
    with batches:
        if rank == 0:
            untrained = evaluate_accelerated(job, batches)
        clock = Clock()
        for batch in batches:
            loss = loss_fn(model(batch.dense, batch.sparse), batch.labels)
            dense.zero_grad(set_to_none=True)
            loss.backward()
            dense.step()
            optimizer.step()
            clock.loss = loss.item()
            clock.tick(batch, report)
        clock.stop()
        batches.barrier()
        if rank == 0:
            trained = evaluate_accelerated(job, batches)
    stats = batches.stats()
    summary = clock.summary() | (metrics_summary(trained, untrained) if rank == 0 else {})
    summary |= {key: stats[key] for key in ("hit_rate", "fetched_rows", "written_rows", "lookahead", "cache_rows")}
    summary["stall_fraction"] = stats["stall_seconds"] / clock.seconds
    if rank:
        return None, summary
    return of_store(model, [layout.table.name for layout in layouts], batches.store), summary


def train_remote(
    job: Job,
    plans: RemotePlans,
    store: Store,
    report: Report,
    groups: Groups | None = None,
    driver: Driver | None = None,
) -> tuple[State | None, Summary]:
    """Train on plans that an oracle elsewhere makes, with rows in this store; both are closed in the end.

    With `groups` this is one of several trainers: the first one has a state in the end, and `joined_summary` makes one
    of what all of them have shown.
    """
    config = job.config
    sync = config.sync
    peers = None if groups is None else Peers(groups, sync.design, sync.delayed, sync.deterministic)
    with closing(plans), closing(store):
        model, binding, layouts = job.model()
        batches = remote_batches(
            model, binding, layouts, layouts[0].optimizer, plans, store, check=config.check and peers is None,
            driver=driver, peers=peers, assign=config.assign,
        )  # fmt: skip
        state, summary = train_over(job, model, layouts, batches, report, 0 if peers is None else peers.rank)
        if peers is None:
            del summary["last_samples"]
        return state, summary | {"plan_bytes": plans.stats()["bytes_received"]}


def train(job: Job, report: Report) -> Summary:
    """Train as configured, write summary.json, return it; a run that fails leaves no directory behind."""
    try:
        state, summary = train_accelerated(job, report)
        summary["parameters_sha256"] = state.sha256()
        return write_summary(job, summary)
    except BaseException:
        shutil.rmtree(job.run_dir, ignore_errors=True)
        with suppress(OSError):
            Path("runs").rmdir()  # if no other run is in it
        raise


def verify(job: Job, report: Report) -> Summary:
    """Train with the reference and with the configured system, and compare every bit."""
    # The configured system first: what is wrong with its settings shows before the slower reference has run.
    found, _ = train_accelerated(job, report)
    expected, _ = train_reference(job, lambda done, note: report(job.iterations + done, note))
    differing = expected.differing(found)
    return {
        "identical": not differing,
        "tensors": len(expected.dense),
        "rows": sum(len(ids) for ids, _ in expected.rows.values()),
        "differing": len(differing),
        "first_difference": differing[0] if differing else None,
        "parameters_sha256": expected.sha256(),
    }
