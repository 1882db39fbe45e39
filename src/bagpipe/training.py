"""A training run: `bagpipe train` and `bagpipe verify` are thin layers over it.

The same job is trained by the reference or by the configured system, and both must end with the same
`parameters_sha256` (I1).
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.build import PlanChoice, Spec, build_loop
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.point import ResumePoint
from bagpipe.checkpointing import Checkpointing
from bagpipe.config import Config, warn_of_idle_rows
from bagpipe.job import Job, dense_optimizer, discard, without_weights
from bagpipe.metrics import Metrics
from bagpipe.oracle.assign import Assigner
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
    find_initial_point,
    has_checkpoint,
    holding,
    note_config,
)
from bagpipe.server.local import open_store, open_stores
from bagpipe.state import State, of_reference, of_store, parameters_sha256
from bagpipe.together import OpenStores, TrainerThreads
from bagpipe.trainer.checkpointer import resumed_states
from bagpipe.trainer.loop import TrainLoop
from bagpipe.trainer.state import buffers_of, dense_parameters, set_tensors
from bagpipe.types import Batch
from bagpipe.world import World, memory_of_files


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


def spec_of(job: Job, world: World) -> Spec:
    """What a job trains, with a model of its own."""
    config = job.config
    model, binding, layouts = job.model()
    store = (lambda layouts: open_store(config, layouts, job.run_dir)) if config.servers else None
    place = config.rows_directory(job.run_dir) or "memory"
    source = world.open_source(job.loader(), 1)
    if source is not None:
        source.adapter.require([name for table in binding.tables for name in table.features])
    return Spec(
        model=model, binding=binding, rows=layouts[0].optimizer, layouts=layouts,
        plans=PlanChoice(config.cache, config.lookahead, config.policy, config.policy_options.build()),
        source=source, store=store or place,
        resident_bytes_max=memory_of_files(place, None if config.servers else config.store_memory),
        check=config.check, once=True, data=job.data_fingerprint(),
    )  # fmt: skip


def train_in(
    world: World, job: Job, report: Report, checkpoint: Checkpointing | None = None, *, hold: bool = False
) -> tuple[State | None, Summary]:
    """Train as the one trainer that this world is for.

    The state is there only if it is asked for with `hold`: all rows are in memory then. Of several trainers the first
    one has it, and `parameters_sha256`; `joined_summary` makes one of what all of them have shown.
    """
    loop = build_loop(spec_of(job, world), world, checkpoint)
    with closing(loop.store):
        state, summary = train_over(job, loop, report, hold=hold)
    if world.trainers == 1:
        del summary["last_samples"]
    return state, summary


def train_configured(
    job: Job, report: Report, resume: Path | None = None, *, hold: bool = False
) -> tuple[State | None, Summary]:
    """Train with the configured system in this process, from its beginning or from the checkpoint at a path."""
    config, checkpoint = job.config, job.checkpointing(resume=resume)
    if config.trainers == 1:
        return train_in(World(), job, report, checkpoint, hold=hold)
    together = TrainerThreads(config, open_stores=_open_servers(job) if config.servers else None)
    loops = [build_loop(spec_of(job, world), world, checkpoint) for world in together.worlds]
    reports = [report, *[_unheard] * (config.trainers - 1)]
    ended = together.run(loops, lambda rank, loop: train_over(job, loop, reports[rank], hold=hold))
    return ended[0][0], joined_summary([summary for _, summary in ended])


def _unheard(_done: int, _note: str) -> None:
    """What trainers beside the first one say in one process."""


def _open_servers(job: Job) -> OpenStores:
    return lambda spec, _saving, _notify: open_stores(job.config, spec.layouts, job.run_dir, job.config.trainers)


def _predict(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(batch.dense, batch.sparse)
    return logits


def train_over(job: Job, loop: TrainLoop, report: Report, *, hold: bool = False) -> tuple[State | None, Summary]:
    """Train the model of a loop over the batches of the job; figures go into the directory of the run, if it has one.

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
        metrics = MetricsLog(job.directory if rank == 0 else None, job, loop.done)
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
    summary |= {key: stats[key] for key in (*moved, "windows", "checkpoints", "plan_bytes") if key in stats}
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
