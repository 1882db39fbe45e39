"""What a run has shown: how far it is, how long it took, how good the model is; joined over trainers, and written."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bagpipe.job import Job
from bagpipe.metrics import Metrics
from bagpipe.trainer.batches import Batches
from bagpipe.types import Batch

Report = Callable[[int, str], None]
"""Told how many iterations are over, and something about the last one."""
Summary = dict[str, Any]


class Clock:
    """Counts what a run has done and how long it took."""

    def __init__(self) -> None:
        self.iterations, self.samples, self.loss, self.seconds = 0, 0, math.nan, math.nan
        self.last_samples = 0
        self._start = time.perf_counter()

    def tick(self, batch: Batch, report: Report) -> None:
        """One more iteration."""
        self.iterations += 1
        self.last_samples = len(batch)
        self.samples += self.last_samples
        report(self.iterations, f"loss {self.loss:.4f}")

    def stop(self) -> None:
        """Training is over."""
        self.seconds = time.perf_counter() - self._start

    def summary(self) -> Summary:
        """For people and for summary.json."""
        return {
            "iterations": self.iterations,
            "samples": self.samples,
            "seconds": self.seconds,
            "samples_per_second": self.samples / self.seconds,
            "loss": self.loss,
            "last_samples": self.last_samples,
        }


def evaluate(job: Job, predict: Callable[[Batch], Tensor]) -> Metrics:
    """Metrics on the held-out samples."""
    metrics = Metrics()
    for batch in job.held_out.batches(job.config.batch_size):
        metrics.add(batch.labels, predict(batch))
    return metrics


def evaluate_accelerated(job: Job, batches: Batches) -> Metrics:
    """The same for a model whose rows are cached."""
    metrics = Metrics()
    with torch.no_grad():
        for batch in batches.evaluate(job.held_out.batches(job.config.batch_size)):
            metrics.add(batch.labels, batches.model(batch.dense, batch.sparse))
    return metrics


def metrics_summary(trained: Metrics, untrained: Metrics) -> Summary:
    """How good the model is, and how good it was before."""
    return {"log_loss": trained.log_loss(), "auc": trained.auc(), "auc_untrained": untrained.auc()}


def write_summary(job: Job, summary: Summary) -> Summary:
    """Keep what a run has shown, beside the configuration that led to it."""
    summary["run_dir"] = str(job.run_dir)
    path = job.run_dir / "summary.json"
    text = json.dumps(summary | {"config": job.config.model_dump(mode="json")}, indent=2)
    with path.open("x", encoding="utf-8") as file:
        file.write(text + "\n")
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
    joined["loss"] = sum(loss * n for loss, n in zip(losses, last, strict=True) if n) / sum(last)
    del joined["last_samples"]
    return joined
