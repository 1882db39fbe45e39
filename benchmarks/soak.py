"""A hundred million touched rows of 16 columns on disk: memory a row, checkpoints while training, and going on.

One table, SGD. Of a batch one half are rows that nobody has touched, the other half rows of before: one in a hundred
any of them, the others of the last few million, as data comes in order of time. A first process trains with four
checkpoints and is killed a little after the third; a second one goes on to the end. `chain` is what is left: how many
checkpoints the last one is made of. `restore_seconds` is the time from the start of training until the rows of the
checkpoint are in the store, `resume_seconds` until the next iteration is over.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bagpipe
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.errors import PipelineError
from benchmarks import Benchmark, Results
from benchmarks.terabyte import memory_of

DIM = 16
CHECKPOINTS = 4
RECENT_ROWS, ANY_SHARE = 2_000_000, 0.01
_STEP = 15_485_863
"""A prime: its multiples go through all rows, in no order that a disk would like."""


class Net(nn.Module):
    """A bag of two rows a sample."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(num_rows, DIM, mode="sum", device="meta")
        self.top = nn.Linear(DIM, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Its logits."""
        logits: torch.Tensor = self.top(self.rows(batch["ids"])).squeeze(1)
        return logits


class Loader:
    """Batches that touch all rows once as new ones."""

    def __init__(self, num_rows: int, batch_size: int) -> None:
        self._num_rows, self._batch_size = num_rows, batch_size

    def __len__(self) -> int:
        return self._num_rows // self._batch_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        size = self._batch_size
        for number in range(len(self)):
            random = torch.Generator().manual_seed(number)
            new = torch.arange(number * size, (number + 1) * size)
            seen = (number + 1) * size
            reach = torch.where(torch.rand(size, generator=random) < ANY_SHARE, seen, min(seen, RECENT_ROWS))
            old = seen - 1 - (torch.rand(size, generator=random, dtype=torch.float64) * reach).long()
            ids = torch.stack([new, old], 1) * _STEP % self._num_rows
            yield {"ids": ids, "labels": (new % 2).float()}


def run(quick: bool) -> Results:
    """Two processes in turn; about twenty minutes and 40 GB of disk."""
    num_rows, batch_size = (65_536, 2_048) if quick else (100_000_000, 65_536)
    with tempfile.TemporaryDirectory(prefix="bagpipe-soak-") as directory:
        first = _session(directory, num_rows, batch_size)
        second = _session(directory, num_rows, batch_size)
        chain = Checkpoints(Path(directory) / "checkpoints").list()[-1].chain
    return [{"rows": num_rows, "floats_per_row": DIM, **first, **second, "chain": len(chain)}]


def _session(directory: str, num_rows: int, batch_size: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.soak", directory, str(num_rows), str(batch_size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - this module
    if done.returncode not in (0, -signal.SIGKILL) or not done.stdout:
        raise PipelineError(f"a session of the soak ended with {done.returncode}: see its messages above")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _train(directory: Path, num_rows: int, batch_size: int) -> None:
    began = time.perf_counter()
    torch.manual_seed(0)
    model, loader = Net(num_rows), Loader(num_rows, batch_size)
    every = len(loader) // CHECKPOINTS
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    memory = memory_of(os.getpid())["anonymous"]
    model, optimizer, prepared = bagpipe.prepare(
        model, optimizer, loader, cache="256MB", store=directory / "rows",
        checkpoint=bagpipe.Checkpointing(directory / "checkpoints", every=every, keep=1, resume="auto"),
    )  # fmt: skip
    loop = prepared.loop
    restored, at, last = time.perf_counter(), loop.done, 0.0
    with prepared:
        prepared.register_for_checkpointing()
        for batch in prepared:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["labels"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if loop.done == at + 1:
                last = time.perf_counter()
            if loop.done == 3 * every + every // 2 and at == 0:
                stats, held = loop.stats(), loop.store.stats()
                saved = Checkpoints(directory / "checkpoints").list()
                _say(
                    samples_per_second=(loop.done - 1) * batch_size / (time.perf_counter() - last),
                    stall_fraction=stats["stall_seconds"] / (time.perf_counter() - restored),
                    checkpoint_wait_ms=1e3 * stats["checkpoint_wait_seconds"] / stats["checkpoints"],
                    checkpoint_processor_seconds=stats["checkpoint_processor_seconds"] / stats["checkpoints"],
                    disk_bytes=held.bytes_on_disk,
                    memory_bytes_per_row=(memory_of(os.getpid())["anonymous"] - memory) / held.num_rows,
                    store_memory_bytes_per_row=held.bytes_in_memory / held.num_rows,
                    rows_before_kill=held.num_rows,
                    checkpoint_bytes=saved[-1].num_bytes,
                )
                os.kill(os.getpid(), signal.SIGKILL)
    _say(resumed_from=at, restore_seconds=restored - began, resume_seconds=last - began)


def _say(**figures: float) -> None:
    sys.stdout.write(json.dumps({name: round(value, 3) for name, value in figures.items()}) + "\n")
    sys.stdout.flush()


BENCHMARK = Benchmark("soak", "a hundred million touched rows on disk, with checkpoints, and going on from one", run)

if __name__ == "__main__":
    place, rows, size = sys.argv[1:]
    _train(Path(place), int(rows), int(size))
