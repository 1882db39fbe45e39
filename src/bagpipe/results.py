"""What a run has shown: how far it is, how long it took, how good the model is; joined over trainers, and written."""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bagpipe.checkpoint.point import directory_name
from bagpipe.errors import StoreError
from bagpipe.job import Job
from bagpipe.metrics import Metrics
from bagpipe.resuming import CHECKPOINTS
from bagpipe.trainer.pipeline import Counters
from bagpipe.types import Batch
from bagpipe.whole_file import whole_file

METRICS = "metrics.jsonl"
METRICS_EVERY_S = 5.0
LINE_BYTES_MAX = 1 << 16
"""Of a line there: none of ours is as long."""

_log = logging.getLogger(__name__)

Report = Callable[[int, str], None]
"""Told how many iterations are over, and something about the last one."""
Summary = dict[str, Any]


class Clock:
    """Counts what a run has done and how long it took, over all sessions that it was trained in."""

    own_of_each_trainer = True
    """Not the same on all trainers, so each one keeps its own."""

    def __init__(self, iterations: int = 0, samples: int = 0) -> None:
        """So much was done before."""
        self.iterations, self.samples, self.resumed_from = iterations, samples, iterations
        self.loss = self.auc_untrained = math.nan
        self.last_samples = 0
        self._seconds = 0.0
        """Of sessions before."""
        self._start, self._stop = time.perf_counter(), math.nan

    @property
    def seconds(self) -> float:
        """Of all sessions."""
        return self._seconds + self.session_seconds

    @property
    def session_seconds(self) -> float:
        """Since the start, up to the stop if there was one."""
        return (time.perf_counter() if math.isnan(self._stop) else self._stop) - self._start

    def start(self) -> None:
        """Training begins now."""
        self._start = time.perf_counter()

    def tick(self, batch: Batch, report: Report) -> None:
        """One more iteration."""
        self.iterations += 1
        self.last_samples = len(batch)
        self.samples += self.last_samples
        report(self.iterations, f"loss {self.loss:.4f}")

    def stop(self) -> None:
        """Training is over."""
        self._stop = time.perf_counter()

    def state_dict(self) -> dict[str, float]:
        """What can't be told from the number of iterations."""
        return {
            "seconds": self.seconds,
            "loss": self.loss,
            "last_samples": self.last_samples,
            "auc_untrained": self.auc_untrained,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from another session."""
        self._seconds, self.loss = state["seconds"], state["loss"]
        self.last_samples, self.auc_untrained = state["last_samples"], state["auc_untrained"]

    def summary(self) -> Summary:
        """For people and for summary.json."""
        resumed = {"resumed_from": self.resumed_from} if self.resumed_from else {}
        return {
            "iterations": self.iterations,
            "samples": self.samples,
            "seconds": self.seconds,
            "samples_per_second": self.samples / self.seconds,
            "loss": self.loss,
            "last_samples": self.last_samples,
            **resumed,
        }


class MetricsLog:
    """The figures of a run as it goes on, every few seconds as a JSON object in a line of its own."""

    def __init__(
        self, directory: Path | None, job: Job, done: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Into `metrics.jsonl` of a directory; None: nowhere. Iterations after `done` have lines of a session before,
        and are trained again: these lines go."""
        self._job, self._clock, self._told_at, self._done = job, clock, clock(), done
        self._before = Counters()
        self._path = None if directory is None else directory / METRICS
        if self._path is not None and self._path.exists():
            with self._tolerant(), self._path.open("r+b") as file:
                kept = 0
                while _iteration(line := file.readline(LINE_BYTES_MAX)) <= done:
                    kept += len(line)
                file.truncate(kept)

    def tick(self, clock: Clock, traffic: Counters, *, last: bool = False) -> None:
        """An iteration is over; of the `last` one there is a line whenever the one before was written."""
        now = self._clock()
        if self._path is None or clock.iterations == self._done or not (last or now >= self._told_at + METRICS_EVERY_S):
            return
        samples = self._job.samples_of(clock.iterations)
        took_s, before = max(now - self._told_at, 1e-9), self._before
        unique = traffic.unique_rows - before.unique_rows
        line = {
            "iteration": clock.iterations,
            "samples": samples,
            "seconds": round(clock.seconds, 3),
            "loss": clock.loss if math.isfinite(clock.loss) else None,
            "samples_per_second": round((samples - self._job.samples_of(self._done)) / took_s, 1),
            "hit_rate": round((traffic.hit_rows - before.hit_rows) / unique, 4) if unique else None,
            "fetched_rows": traffic.fetched_rows - before.fetched_rows,
            "stall_fraction": round((traffic.stall_s - before.stall_s) / took_s, 4),
        }
        self._told_at, self._done, self._before = now, clock.iterations, copy.copy(traffic)
        with self._tolerant(), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """A file that can't be written is no reason to lose the run."""
        try:
            yield
        except OSError as error:
            _log.warning("%s can't be written (%s): there are no more figures of this run", self._path, error.strerror)
            self._path = None


def _iteration(line: bytes) -> float:
    """Of a line of metrics; one that a crash has cut belongs to no iteration."""
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf


def evaluate(job: Job, predict: Callable[[Batch], Tensor], tell: Callable[[str], None] = lambda _: None) -> Metrics:
    """Metrics on the held-out samples; `tell` is told how far it is."""
    metrics, size = Metrics(), job.config.batch_size
    num_batches = -(-job.held_out.num_samples // size)
    with torch.no_grad():
        for number, batch in enumerate(job.held_out.batches(size)):
            tell(f"evaluating: {number:,} of {num_batches:,} batches")
            metrics.add(batch.labels, predict(batch))
    return metrics


def metrics_summary(trained: Metrics, auc_untrained: float) -> Summary:
    """How good the model is, and how good it was before."""
    return {"log_loss": trained.log_loss(), "auc": trained.auc(), "auc_untrained": auc_untrained}


def write_summary(job: Job, summary: Summary) -> Summary:
    """Keep what a run has shown, beside the configuration that led to it; where the file exists, the run has ended."""
    if job.config.init_from is not None:
        summary["initialised_from"] = str(job.config.init_from)
    summary["run_dir"] = str(job.run_dir)
    if job.config.checkpoint.retained:
        summary["weights"] = str(job.run_dir / CHECKPOINTS / directory_name(summary["iterations"]))
    path = job.run_dir / "summary.json"
    text = json.dumps(summary | {"config": job.config.model_dump(mode="json")}, indent=2)
    try:
        with whole_file(path) as file:
            file.write(f"{text}\n".encode())
    except OSError as error:
        raise StoreError(
            f"can't write {path} ({error.strerror or error}): free space or check the disk; a run with checkpoints can "
            "then be ended with --resume"
        ) from error
    return summary


def joined_summary(summaries: Sequence[Summary]) -> Summary:
    """What trainers have shown, as one: they share batches, so counts are summed and the rest is the first one's."""
    joined = dict(summaries[0])
    for key in ("samples", "fetched_rows", "written_rows", "plan_bytes"):
        if key in joined:
            joined[key] = sum(summary[key] for summary in summaries)
    joined["samples_per_second"] = joined["samples"] / joined["seconds"]
    last = [summary.pop("last_samples") for summary in summaries]
    losses = [summary["loss"] for summary in summaries]
    joined["loss"] = sum(loss * n for loss, n in zip(losses, last, strict=True) if n) / (sum(last) or math.nan)
    del joined["last_samples"]
    return joined
