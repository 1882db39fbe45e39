"""A training run: `bagpipe train` and `bagpipe verify` are thin layers over it.

The same job is trained by the reference or by the configured system, and both must end with the same
`parameters_sha256` (I1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.checkpointing import (
    Saving,
    as_marked,
    make_facts,
    recovery_period,
    with_marks,
)
from bagpipe.config import Config, warn_of_idle_rows
from bagpipe.job import Job, dense_optimizer, discard, without_weights
from bagpipe.layout import RowLayout
from bagpipe.metrics import Metrics
from bagpipe.oracle.assign import Assigner
from bagpipe.policies import POLICIES
from bagpipe.prepared import PreparedLoader, row_parameters
from bagpipe.reference import Reference
from bagpipe.results import (
    Clock,
    MetricsLog,
    Report,
    Summary,
    evaluate,
    joined_summary,
    metrics_summary,
    write_summary,
)
from bagpipe.resuming import (
    CHECKPOINTS,
    check_point,
    find_initial_point,
    find_resume_point,
    has_checkpoint,
    holding,
    note_config,
)
from bagpipe.script import PlanChoice, Script
from bagpipe.server.local import open_store, open_stores
from bagpipe.state import State, of_reference, of_store, parameters_sha256
from bagpipe.store import Store
from bagpipe.store.views import shared_views
from bagpipe.together import Made, Trainers
from bagpipe.trainer.background import Background
from bagpipe.trainer.checkpointer import ROUND_S, Periods, resumed_states
from bagpipe.trainer.collective import Groups
from bagpipe.trainer.joint_update import Peers
from bagpipe.trainer.loop import TrainLoop
from bagpipe.trainer.pipeline import DEPTH
from bagpipe.trainer.remote_plans import RemotePlans, remote_loop
from bagpipe.trainer.stages import Driver
from bagpipe.trainer.state import buffers_of, dense_parameters, set_tensors
from bagpipe.types import Batch
from bagpipe.world import OpenStore, memory_of_files, open_local_rows


def train_reference(job: Job, report: Report) -> tuple[State, Summary]:
    """Train with the reference, on the trainers that the job asks for."""
    model, binding, layouts = job.model()
    config = job.config
    dense = dense_optimizer(config.dense_optimizer)
    assign = Assigner(config.assign, config.trainers, config.seed, [table.features for table in binding.tables])
    reference = Reference(model, binding, layouts, dense, config.trainers, assign)
    if config.init_from is not None:
        take_over(reference, find_initial_point(config.init_from))
    clock = Clock()
    clock.auc_untrained = evaluate(job, reference.predict).auc()
    clock.start()
    for batch in job.batches():
        clock.loss = reference.step(batch)
        clock.tick(batch, report)
    clock.stop()
    trained = evaluate(job, reference.predict)
    return of_reference(reference), clock.summary() | metrics_summary(trained, clock.auc_untrained)


def take_over(reference: Reference, point: ResumePoint) -> None:
    """Have the reference begin with the rows, dense part and optimizer states of a checkpoint."""
    checkpoint, model = point.open(), reference.model
    for rows in reference.tables:
        if rows.layout.table.name in [table.name for table in checkpoint.manifest.tables]:
            for ids, values in checkpoint.rows(rows.layout.table.name):
                rows.write(ids, values.copy())
    states = resumed_states(point, 0)
    if states is None:
        return
    first, _ = states
    set_tensors(dense_parameters(model), first["parameters"])
    set_tensors(buffers_of(model), first["buffers"])
    reference.iteration = first["loop"]["optimizer"]["updates"]
    dense, saved = reference.dense_optimizer, first["attached"].get("dense")
    if dense is not None and saved is not None:
        settings, state = _settings(dense), saved["state"]
        # Rows have the last group.
        dense.load_state_dict({**state, "param_groups": state["param_groups"][: len(settings)]})
        _set(dense, settings)


def train_configured(
    job: Job, report: Report, resume: Path | None = None, *, hold: bool = False
) -> tuple[State | None, Summary]:
    """Train with the configured system, from its beginning or from the checkpoint at a path.

    The state is there only if it is asked for with `hold`: all rows are in memory then.
    """
    if job.config.trainers > 1:
        return train_together(job, report, resume, hold=hold)
    config = job.config
    model, _, layouts = job.model()
    initials = {layout.table.name: layout.initial for layout in layouts}
    plans = PlanChoice(config.cache, config.lookahead, config.policy, config.policy_options.build())
    script = Script(
        model, job.loader(), plans, _store(job), config.store_memory if not config.servers else None, device=None,
        accumulate=1, seed=config.seed, check=config.check, depth=DEPTH, threads=None,
    )  # fmt: skip
    script.bind(None, job.train.tables, ())
    script.lay_out(layouts[0].optimizer, lambda table: initials[table.name])
    loop = script.open(job.checkpointing(resume=resume), once=True)
    with closing(loop.store):
        state, summary = train_over(job, loop, report, job.directory, hold=hold)
    del summary["last_samples"]
    return state, summary


def train_together(
    job: Job, report: Report, resume: Path | None = None, *, hold: bool = False
) -> tuple[State | None, Summary]:
    """The same with several trainers, which are threads of this process."""
    config = job.config
    made = [job.model() for _ in range(config.trainers)]
    saving = plan_job(job, made[0], find_resume_point(resume, None))
    trainers = Trainers(
        config,
        made,
        job.loader(),
        partial(open_views, job, saving),
        checkpointer=partial(saving.checkpointer, shares_process=True),
    )
    reports = [report, *[_unheard] * (config.trainers - 1)]
    ended = trainers.run(lambda rank, loop: train_over(job, loop, reports[rank], job.directory, hold=hold))
    return ended[0][0], joined_summary([summary for _, summary in ended])


def plan_job(
    job: Job, made: Made, resume: ResumePoint = START, *, directory: Path | None = None, recover: bool = False
) -> Saving:
    """How a job is saved, and where it continues; CheckpointError if a checkpoint is of another run."""
    config = job.config
    model, binding, layouts = made
    checkpointing = job.checkpointing(directory)
    facts = make_facts(
        layouts, binding, checkpointing, data=job.data_fingerprint(), trainers=config.trainers, servers=config.servers
    )
    if resume == START and config.init_from is not None:
        resume = find_initial_point(config.init_from)
    check_point(resume, facts, model, binding)
    recovery = recovery_period(config.recovery.every) if recover else None
    periods = Periods(None, recovery) if checkpointing is None else checkpointing.periods(recovery)
    if checkpointing is not None and checkpointing.directory is not None:
        directory = Path(checkpointing.directory)
    return Saving(facts, directory, periods, config.checkpoint.keep, resume)


def _unheard(_done: int, _note: str) -> None:
    """What trainers beside the first one say in one process."""


def open_views(
    job: Job, saving: Saving, layouts: Sequence[RowLayout], notify: Sequence[Callable[[], None]]
) -> list[Store]:
    """The rows of a job, as each of its trainers sees them; those that it continues with are loaded."""
    config = job.config
    views: list[Store]
    if config.servers:
        views = [*open_stores(config, layouts, job.run_dir, config.trainers)]
    else:
        where = job.config.rows_directory(job.run_dir) or "memory"
        store = open_local_rows(where, layouts, memory_of_files(where, config.store_memory))
        views = [*shared_views(with_marks(store) if saving.is_active else store, config.trainers, notify)]
    try:
        if saving.is_active:
            saving.restore(as_marked(views[0]))
    except BaseException:
        for view in views:
            view.close()
        raise
    return views


def _store(job: Job) -> str | Path | OpenStore:
    """Where the rows of a job live."""
    if job.config.servers:
        return lambda layouts: open_store(job.config, layouts, job.run_dir)
    return job.config.rows_directory(job.run_dir) or "memory"


def _predict(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(batch.dense, batch.sparse)
    return logits


def train_over(
    job: Job, loop: TrainLoop, report: Report, directory: Path | None, *, hold: bool = False
) -> tuple[State | None, Summary]:
    """Train the model of a loop over the batches of the job; figures go into the `directory` of the run, if it has one.

    Of several trainers all call it, and the first one evaluates, has `parameters_sha256`, and a state if asked to
    `hold` one.
    """
    model, rank = loop.model, loop.rank
    optimizer = dense_optimizer(job.config.dense_optimizer)(list(model.parameters()))
    loader = PreparedLoader(loop, row_parameters(loop.binding, loop.lookups.device), [optimizer], {})
    settings = _settings(optimizer)
    loss_fn = nn.BCEWithLogitsLoss()
    clock = Clock(loop.done, job.samples_of(loop.done) if rank == 0 else 0)
    trained = Metrics()
    with loop:
        loader.register_for_checkpointing(clock=clock)
        if not loop.done:
            _set(optimizer, settings)
        if rank == 0 and not loop.done:
            predict = partial(_predict, model)
            clock.auc_untrained = evaluate(job, predict, lambda note: report(0, f"before training, {note}")).auc()
        metrics = MetricsLog(directory if rank == 0 else None, job, loop.done)
        clock.start()
        batches = iter(loader)  # held: otherwise an error ends the iteration before the loop can tell others of it
        for batch in batches:
            loss = loss_fn(model(batch.dense, batch.sparse), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.loss = loss.item()
            clock.tick(batch, report)
            metrics.tick(clock, loop.traffic)
        clock.stop()
        metrics.tick(clock, loop.traffic, last=True)
        if rank == 0:
            trained = evaluate(job, partial(_predict, model), partial(report, clock.iterations))
    stats = loop.stats()
    summary = clock.summary() | (metrics_summary(trained, clock.auc_untrained) if rank == 0 else {})
    moved = ("hit_rate", "fetched_rows", "written_rows", "lookahead", "cache_rows", "peak_rows")
    summary |= {key: stats[key] for key in (*moved, "windows", "checkpoints") if key in stats}
    summary["stall_fraction"] = stats["stall_seconds"] / clock.session_seconds
    if stats.get("checkpoints"):
        cost_s = stats["checkpoint_wait_seconds"] + stats["checkpoint_processor_seconds"]
        summary["checkpoint_fraction"] = cost_s / clock.session_seconds
    if rank:
        return None, summary
    tables = [layout.table.name for layout in loop.layouts]
    summary["parameters_sha256"] = parameters_sha256(model, tables, loop.store)
    return of_store(model, tables, loop.store) if hold else None, summary


def _settings(dense: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Learning rates and the like, which are the configuration's, also where a state of another run was taken over."""
    return [{name: value for name, value in group.items() if name != "params"} for group in dense.param_groups]


def _set(dense: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    for group, values in zip(dense.param_groups, settings, strict=True):
        group.update(values)


def train_remote(
    job: Job,
    plans: RemotePlans,
    store: Store,
    report: Report,
    groups: Groups | None = None,
    driver: Driver | None = None,
    *,
    resume: ResumePoint = START,
    checkpoints: Path | None = None,
    recover: bool = False,
    generation: int = 0,
    token: str = "",
    threads: bool = True,
    hold: bool = False,
) -> tuple[State | None, Summary]:
    """Train on plans that an oracle elsewhere makes, with rows in this store; both are closed in the end.

    With `groups` this is one of several trainers: the first one has `parameters_sha256`, and a state if asked to `hold`
    one; `joined_summary` makes one of what all of them have shown.

    With `resume` training continues where the run was: servers have the rows of that point already, and plans begin
    there too. Checkpoints go to the directory `checkpoints`, which all servers and trainers must see under that path:
    those that `checkpoint.every` asks for, and with `recover` those that a launch recovers from. All trainers of a
    `generation` must be given the same, and the same `token` of 8 hexadecimal digits. Without `threads` nothing is
    written beside training, for tests under a scheduler.
    """
    config = job.config
    sync = config.sync
    peers = None if groups is None else Peers(groups, sync.design, sync.delayed, sync.moving)
    rank = 0 if peers is None else peers.rank
    with closing(plans), closing(store):
        made = job.model()
        model, binding, layouts = made
        saving = plan_job(job, made, resume, directory=checkpoints, recover=recover)
        # Servers that begin have no rows, whatever the run begins with.
        restored = not saving.resume.is_initial
        saving = replace(saving, restored=restored, generation=generation, token=token or saving.token)
        loading = Background("bagpipe-loading", threads=threads)
        if rank == 0 and not restored:
            # Which has deadlines of its own, for as long as servers read nothing.
            loading.start("loading rows", lambda: saving.restore(as_marked(store)), progress=time.monotonic)
        loop = remote_loop(
            model, binding, layouts, layouts[0].optimizer, plans, store, check=config.check and peers is None,
            driver=driver, peers=peers, assign=config.assign,
            checkpointer=saving.checkpointer(store, rank, threads=threads),
            ahead=POLICIES[config.policy].lead(config.lookahead, config.policy_options.build()),
        )  # fmt: skip
        while not restored and any(loop.gather(loading.is_busy(ROUND_S), "the rows to begin with")):
            pass
        loading.close()
        directory = None if checkpoints is None or not checkpoints.parent.is_dir() else checkpoints.parent
        state, summary = train_over(job, loop, report, directory, hold=hold)
        if peers is None:
            del summary["last_samples"]
        return state, summary | {"plan_bytes": plans.stats()["bytes_received"]}


def train(job: Job, report: Report, resume: Path | None = None) -> Summary:
    """Train as configured, write summary.json, return it.

    With checkpoints the run can be resumed, and `resume` is the path of the one to go on from. A run that fails leaves
    no directory behind, unless it has a checkpoint.
    """
    _warn(job.config)
    with holding(job.run_dir):
        try:
            if job.config.checkpoint.retained:
                note_config(job.run_dir, job.config)
            _, summary = train_configured(job, report, resume)
            if resume is not None:  # of a launch, which may have left some for recovery
                Checkpoints(job.run_dir / CHECKPOINTS).end(keep_last=job.config.checkpoint.retained)
            return write_summary(job, summary)
        except BaseException:
            if not has_checkpoint(job.run_dir):
                discard(job.run_dir)
            raise


def verify(job: Job, report: Report) -> Summary:
    """Train with the reference and with the configured system, and compare every bit."""
    _warn(job.config)
    job = replace(job, config=without_weights(job.config))
    # The configured system first: what is wrong with its settings shows before the slower reference has run.
    found, _ = train_configured(job, report, hold=True)
    assert found is not None
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


def _warn(config: Config) -> None:
    warn_of_idle_rows(config.sync.design, config.trainers, config.policy)
