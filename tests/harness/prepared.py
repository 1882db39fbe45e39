"""Small raw files with everything in them, and data sets compared byte by byte."""

from pathlib import Path

import numpy as np

from bagpipe.data.prepare.job import prepare
from bagpipe.data.prepare.options import Options

SCHEMA = """
format = "csv"
label = "click"
numeric = ["price", { column = "age", transform = "none" }]
categorical = [
  { column = "user", kind = "integer" },
  "city",
  { column = "seen", table = "item", separator = "|" },
  { column = "item", table = "item" },
]
"""
TIMED = SCHEMA.replace("numeric =", 'time = "when"\nsort = true\nnumeric =')


def line_of(rng, number, *, timed=False):
    user = "" if rng.random() < 0.1 else str(int(rng.zipf(1.5)) % 500 - 250)
    city = "" if rng.random() < 0.2 else f"city {int(rng.zipf(1.4)) % 40}"
    seen = "|".join(f"i{int(rng.zipf(1.3)) % 300}" for _ in range(int(rng.integers(0, 4))))
    item = f"i{int(rng.zipf(1.3)) % 300}"
    cells = [str(int(number % 3 == 0)), f"{rng.random() * 90:.2f}", str(int(rng.integers(0, 99)))]
    cells += [user, city, seen, item]
    return ",".join(cells + ([str(1_400_000_000 + int(rng.integers(0, 300_000)))] if timed else []))


def write_raw(directory, num_lines=1000, *, files=1, seed=0, timed=False, bad=()):
    """Files day_0.csv, ... with that many lines in all; `bad` lines, counted over all files, have no number for age."""
    rng = np.random.default_rng(seed)
    directory.mkdir(exist_ok=True)
    header = "click,price,age,user,city,seen,item" + (",when" if timed else "")
    paths = []
    for file in range(files):
        numbers = range(file * num_lines // files, (file + 1) * num_lines // files)
        lines = [line_of(rng, number, timed=timed) for number in numbers]
        for place, number in enumerate(numbers):
            if number in bad:
                cells = lines[place].split(",")
                lines[place] = ",".join([*cells[:2], "old", *cells[3:]])
        paths.append(directory / f"day_{file}.csv")
        paths[-1].write_text("\n".join([header, *lines]) + "\n")
    (directory / "schema.toml").write_text(TIMED if timed else SCHEMA)
    return paths


def run(paths, destination, **options):
    given = {"shard_samples": 150, "schema": Path(paths[0]).parent / "schema.toml", "memory": "64GB"} | options
    return prepare("csv", [Path(path) for path in paths], Path(destination), Options(**given))


def contents(directory):
    """Every file of a directory."""
    files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
