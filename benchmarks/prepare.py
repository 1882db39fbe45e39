"""`bagpipe bench prepare`: how fast Criteo's text becomes shards, and how much memory that takes.

A file in Criteo Kaggle's format is written from generated data with its skew: 13 whole numbers, of which some are
missing, and 26 columns of 8 hexadecimal digits. Each run is `bagpipe data prepare` in a process of its own; rates are
what it reports, peak memory is what the operating system saw of that process. About a minute.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from bagpipe.cli import main
from bagpipe.data.generator import generated
from bagpipe.errors import PipelineError
from bagpipe.kernels.random import mix_numpy
from benchmarks import Benchmark, Results

PRESET = "criteo-kaggle-like"
SAMPLES, SAMPLES_QUICK = 1_000_000, 20_000
MEMORY = "2GB"
RUNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("plain", "first", ()),
    ("gzip", "first", ()),
    ("plain", "first, min-count 3", ("--min-count", "3")),
    ("plain", "frequency", ("--numbering", "frequency")),
    ("plain", "hash", ("--numbering", "hash:1000000")),
    ("plain", "ids", ("--numbering", "ids")),
)
_BATCH = 1 << 15
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def run(quick: bool) -> Results:
    """Every numbering from plain text, and the default one from gzip."""
    samples = SAMPLES_QUICK if quick else SAMPLES
    with tempfile.TemporaryDirectory(prefix="bagpipe-prepare-") as directory:
        plain, packed = Path(directory, "train.txt"), Path(directory, "packed", "train.txt.gz")
        write_criteo(plain, samples)
        packed.parent.mkdir()
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as file:
            shutil.copyfileobj(source, file)
        _prepare(plain, Path(directory, "warm"), ("--limit", "1000", "--numbering", "frequency"))
        return [
            {"file": kind, "numbering": name}
            | _prepare(plain if kind == "plain" else packed, Path(directory, "data"), options)
            for kind, name, options in RUNS
        ]


def write_criteo(path: Path, samples: int, seed: int = 0) -> None:
    """A file in the format of Criteo Kaggle's train.txt, with the skew of its categories."""
    source = generated(PRESET, samples, seed)
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    writer = None
    with path.open("wb") as file:
        for batch in source.batches(_BATCH):
            dense = batch.dense.numpy()
            numbers = np.expm1(np.abs(dense) * 2).astype(np.int64)
            columns: dict[str, pa.Array] = {"label": pa.array(batch.labels.numpy().astype(np.int8))}
            for i in range(dense.shape[1]):
                columns[f"I{i + 1}"] = pa.array(numbers[:, i], mask=dense[:, i] < -1)
            for i, (name, ids) in enumerate(batch.sparse.items()):
                columns[name] = _hexadecimal(ids.values.numpy()[:, 0], i)
            table = pa.table(columns)
            writer = writer or csv.CSVWriter(file, table.schema, write_options=options)
            writer.write_table(table)
        assert writer is not None
        writer.close()


def _hexadecimal(ids: np.ndarray, column: int) -> pa.Array:
    words = mix_numpy(ids.astype(np.uint64) + np.uint64(column << 40))
    shifts = np.arange(28, -4, -4, dtype=np.uint64)
    digits = _DIGITS[(words[:, None] >> shifts) & np.uint64(15)]
    offsets = np.arange(0, 8 * len(ids) + 1, 8, dtype=np.int32)
    return pa.StringArray.from_buffers(len(ids), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(digits)))


def _prepare(source: Path, destination: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """Run the command in a process of its own; what it says and what it took."""
    arguments = ["data", "prepare", "criteo", str(source), str(destination), "--memory", MEMORY, "--json", *options]
    child = subprocess.run(  # noqa: S603 - this module, with this interpreter
        [sys.executable, "-m", "benchmarks.prepare", *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if child.returncode:
        raise PipelineError(f"`bagpipe data prepare` ended with {child.returncode}: see above")
    said, peak = (json.loads(line) for line in child.stdout.splitlines())
    size = sum(path.stat().st_size for path in destination.rglob("*") if path.is_file())
    shutil.rmtree(destination)
    return {
        "samples": said["samples"],
        "rows": said["rows"],
        "samples_per_second": said["samples_per_second"],
        "bytes_per_second": source.stat().st_size / said["seconds"],
        "peak_memory_mb": peak / 1e6,
        "written_mb": size / 1e6,
    }


def _peak_resident_bytes() -> int:
    """The most memory that this process had; unlike `ru_maxrss`, without what it was before it ran this program."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


BENCHMARK = Benchmark("prepare", "Criteo's text to shards: rate and peak memory, each way of numbering", run)

if __name__ == "__main__":
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
    sys.stdout.write(f"{_peak_resident_bytes()}\n")
