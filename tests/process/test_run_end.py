"""How a run ends where its rows are more than its memory: by the `bagpipe` command, in processes of their own."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from benchmarks.terabyte import memory_group
from harness.prepared import run

IDS_A_SAMPLE = 100
BATCH = 100
SHORT, LONG = 4, 27
"""Iterations."""
ROW_BYTES = 2 * 129 * 4
"""A vector of 128 numbers and one for the linear part, each with its optimizer state."""
WIDE_DIM, WIDE_ROW_BYTES = 512, 3 * 513 * 4
"""The same for longer vectors and Adam, which keeps two numbers for each."""
LIMIT_BYTES = 1_000_000_000
LIMITED = """
import os, resource, sys
from pathlib import Path

limit, group = sys.argv.pop(1), sys.argv.pop(1)
if group:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
else:
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
from bagpipe.cli import main
main()
"""
"""The `bagpipe` command, in a control group; where none can be made, with a limit for memory that is no file's. What is
mapped of files counts in the group, and in the largest memory of the process either way."""
SCHEMA = """
format = "csv"
label = "click"
numeric = ["price"]
categorical = [{ column = "seen", kind = "integer", separator = "|" }]
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains on samples that name any 64-bit ids, none of them twice: summary, and the largest memory of a process."""
    directory = tmp_path_factory.mktemp("run")
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (2 * (LONG * BATCH + 300), IDS_A_SAMPLE))
    lines = [f"{number % 2},{number % 7},{'|'.join(map(str, row))}" for number, row in enumerate(ids.tolist())]
    (directory / "raw.csv").write_text("\n".join(["click,price,seen", *lines]) + "\n")
    (directory / "schema.toml").write_text(SCHEMA)
    run([directory / "raw.csv"], directory / "data", numbering=("ids",), shard_samples=1 << 18)

    def train(iterations, servers=0, limit_bytes=None, **other):
        settings = {
            "data.path": directory / "data", "data.held_out": 0.1, "batch_size": BATCH, "iterations": iterations,
            "threads": 1, "model.name": "wide_deep", "model.dim": 128, "cache": 30_000, "lookahead": 2,
            "store": "mapped", "store_memory": "64MB", "servers": servers,
        } | other  # fmt: skip
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        code = ["from bagpipe.cli import main; main()"]
        with nullcontext() if limit_bytes is None else memory_group(limit_bytes) as group:
            if limit_bytes is not None:
                code = [LIMITED, str(limit_bytes), str(group or "")]
            command = [sys.executable, "-c", *code, "train", *words]
            command += ["--json", "--run-dir", tempfile.mkdtemp(dir=directory)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as process:
                out = process.stdout.read()
                _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, out
        return json.loads(out), used.ru_maxrss * 1024

    return train


@pytest.fixture(scope="module")
def few_bytes(train):
    """What a run with few rows takes."""
    return train(SHORT)[1]


@pytest.mark.parametrize("servers", [pytest.param(0, marks=pytest.mark.long), 1])
def test_the_end_of_a_run_does_not_bring_its_rows_into_memory(train, few_bytes, servers):
    summary, many_bytes = train(LONG, servers)
    assert summary["written_rows"] == LONG * BATCH * IDS_A_SAMPLE
    assert len(summary["parameters_sha256"]) == 64
    more_rows_bytes = (LONG - SHORT) * BATCH * IDS_A_SAMPLE * ROW_BYTES
    assert many_bytes - few_bytes < more_rows_bytes / 2


@pytest.mark.long
def test_a_run_whose_rows_exceed_its_memory_ends_with_the_same_digest(train):
    wide = {"model.dim": WIDE_DIM, "row_optimizer.name": "adam", "batch_size": BATCH // 2, "cache": 15_000}
    expected = train(4 * LONG, **wide)[0]["parameters_sha256"]  # first, since kernels take more memory to compile
    summary, used_bytes = train(4 * LONG, limit_bytes=LIMIT_BYTES, **wide)
    assert summary["written_rows"] * WIDE_ROW_BYTES > 3 * LIMIT_BYTES > 2 * used_bytes
    assert summary["parameters_sha256"] == expected
    assert json.loads(Path(summary["run_dir"], "summary.json").read_text())["parameters_sha256"] == expected
