"""Tables far larger than memory: `criteo-terabyte-like`, 882.8 M rows of 16 columns, on disk, within 6 GB of memory.

Wide&Deep with SGD rows in a process of its own. Its memory is what it holds itself and the pages of files that it has
mapped, measured from outside ten times a second. Where this process may make control groups with a memory limit, the
kernel keeps the limit (`limited_by` is "cgroup"). Elsewhere it keeps it for anonymous memory only, less what the store
may take of the page cache, which the store sees to itself ("rlimit").
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bagpipe.data import generated
from bagpipe.errors import PipelineError
from bagpipe.initial import Uniform
from bagpipe.models import build_model
from bagpipe.prepared import Options, prepare
from bagpipe.store.mapped import RESIDENT_BYTES_MAX
from benchmarks import Benchmark, Results

PRESET = "criteo-terabyte-like"
DIM = 16
LR = 0.01
CACHE = "256MB"
LIMIT_BYTES = 6 * 10**9
WARM_UP_ITERATIONS = 10
POLL_S = 0.1
ROWS_DIRECTORY = "rows"
_GROUPS = Path("/sys/fs/cgroup")


def run(quick: bool) -> Results:
    """Train in a child process and watch it; about two minutes."""
    batch_size, iterations = (256, WARM_UP_ITERATIONS + 2) if quick else (16_384, WARM_UP_ITERATIONS + 240)
    with tempfile.TemporaryDirectory(prefix="bagpipe-terabyte-") as directory, memory_group(LIMIT_BYTES) as group:
        command = [sys.executable, "-m", "benchmarks.terabyte", directory, str(batch_size), str(iterations)]
        if group is not None:
            command.append(str(group))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:  # noqa: S603 - this module
            try:
                memory = _watch(child)
                said = child.communicate()[0]
            finally:
                child.kill()
        if child.returncode:
            raise PipelineError(f"a process that should train within {LIMIT_BYTES:,} B ended with {child.returncode}")
    limited_by = "rlimit" if group is None else "cgroup"
    return [json.loads(said) | memory | {"limit_bytes": LIMIT_BYTES, "limited_by": limited_by}]


def _watch(child: subprocess.Popen[str]) -> dict[str, Any]:
    """The most memory that the process took at once, until it ends: of its own, and with pages of its files."""
    peak = {"anonymous": 0, "resident": 0}
    while child.poll() is None:
        peak = {kind: max(most, memory_of(child.pid)[kind]) for kind, most in peak.items()}
        time.sleep(POLL_S)
    return {"peak_memory_bytes": peak["resident"], "peak_anonymous_bytes": peak["anonymous"]}


def memory_of(process: int) -> dict[str, int]:
    """Bytes that a process has in memory: its own, and all with the pages of files that it has mapped."""
    found = {"anonymous": 0, "resident": 0}
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines():
            for kind, name in (("anonymous", "RssAnon:"), ("resident", "VmRSS:")):
                if line.startswith(name):
                    found[kind] = int(line.split()[1]) * 1024
    return found


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """A control group (version 2) below this process's own with that limit, if this process may make one."""
    group: Path | None = None
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").rpartition("0::/")[2].strip()
        parent = _GROUPS / own
        if "memory" in (parent / "cgroup.subtree_control").read_text(encoding="ascii").split():
            group = parent / f"bagpipe-bench-{os.getpid()}"
            group.mkdir()
            (group / "memory.swap.max").write_text("0", encoding="ascii")
            (group / "memory.max").write_text(str(limit_bytes), encoding="ascii")
    except OSError:
        if group is not None:
            with suppress(OSError):
                group.rmdir()
        group = None
    try:
        yield group
    finally:
        if group is not None:
            group.rmdir()


def _train(directory: Path, batch_size: int, iterations: int, group: Path | None) -> dict[str, Any]:
    """What the child process does, under its limit."""
    if group is None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES - RESIDENT_BYTES_MAX,) * 2)
    else:
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    data = generated(PRESET, batch_size * iterations)
    model = build_model("wide_deep", data.tables, data.num_dense, DIM, "meta")
    model, optimizer, loader = prepare(
        model, torch.optim.SGD(model.parameters(), lr=LR), data.batches(batch_size), cache=CACHE,
        store=directory / ROWS_DIRECTORY, features=data.tables,
        options=Options(initial=lambda table: Uniform(0, table.name, DIM**-0.5)),
    )  # fmt: skip
    start, waited = 0.0, 0.0
    with loader:
        for number, batch in enumerate(loader):
            if number == WARM_UP_ITERATIONS:
                start, waited = time.perf_counter(), loader.stats()["stall_seconds"]
            logits = model(batch.dense, batch.sparse)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    seconds = time.perf_counter() - start
    stats = loader.stats()
    held = loader.loop.store.stats()
    loader.loop.store.close()
    return {
        "table_rows": sum(table.rows or 0 for table in data.tables),
        "table_bytes": sum(table.rows or 0 for table in data.tables) * DIM * 4,
        "batch_size": batch_size,
        "iterations": iterations,
        "samples_per_second": batch_size * (iterations - WARM_UP_ITERATIONS) / seconds,
        "hit_rate": stats["hit_rate"],
        "stall_fraction": (stats["stall_seconds"] - waited) / seconds,
        "lookahead": stats["lookahead"],
        "cache_rows": stats["cache_rows"],
        "rows_touched": held.num_rows,
        "disk_bytes": held.bytes_on_disk,
    }


BENCHMARK = Benchmark("terabyte", "tables of 56 GB trained from disk within 6 GB of memory", run)

if __name__ == "__main__":
    place, size, count, *groups = sys.argv[1:]
    found = _train(Path(place), int(size), int(count), Path(groups[0]) if groups else None)
    sys.stdout.write(json.dumps(found) + "\n")
