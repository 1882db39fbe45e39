"""One side of the comparison: runs the entries with the release that this interpreter has, and writes what they gave.

python side.py RESULTS.json [--part] [--renamed]. It works with the release at the start too, so it uses public names
alone; settings have the names of the start unless `--renamed` asks for those of today.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cases import BASE, PART, WHOLE, Case  # noqa: E402
from renamed import renamed  # noqa: E402

COMPARED = ("parameters_sha256", "fetched_rows", "written_rows", "hit_rate", "loss", "auc")
KILL_AT = 17
DEADLINE_S = 300.0


def write_data(path: Path) -> None:
    """The frozen samples as files that `data.path` takes."""
    import pyarrow.parquet as pq
    import torch

    from bagpipe import Batch, Ids, Table
    from bagpipe.data import ShardWriter

    table = pq.read_table(HERE / "data.parquet")
    dense = torch.tensor([table[f"dense_{number}"].to_pylist() for number in range(4)]).T.contiguous()
    sparse = {name: Ids(torch.tensor(table[name].to_pylist())[:, None]) for name in ("user", "item", "city", "device")}
    bags, weights = (table[name].to_pylist() for name in ("recent", "recent_weights"))
    offsets = torch.tensor([0, *map(len, bags)]).cumsum(0)[:-1]
    flat = [torch.tensor([each for bag in part for each in bag]) for part in (bags, weights)]
    sparse["recent"] = Ids(flat[0], offsets, flat[1])
    tables = (Table("user", 1000), Table("item", 500, ("item", "recent")), Table("city", 20), Table("device"))
    with ShardWriter(path, tables, 4) as writer:
        writer.add(Batch(dense, sparse, torch.tensor(table["label"].to_pylist())))
        writer.finish()


def command(*words: object) -> tuple[int, str]:
    """What a `bagpipe` command prints, in this process: importing torch for each would take most of the time."""
    from bagpipe.cli import main

    printed, said = io.StringIO(), io.StringIO()
    sys.argv = ["bagpipe", *map(str, words)]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, printed.getvalue() or said.getvalue()


def run_python(*words: object) -> tuple[int, str]:
    """What another process of this interpreter prints."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout or ended.stderr


def run(case: Case, directory: Path, data: Path, now: bool) -> dict[str, Any]:
    """What an entry gives; whatever goes wrong is in it."""
    given = settings_of(case, now)
    settings = [word for setting in (f"data.path={data}", *given) for word in ("--set", setting)]
    if case.kind == "train":
        code, text = command("train", "--json", "--run-dir", directory / "run", *settings)
    elif case.kind == "launch":
        (directory / "empty.toml").touch()
        counts = [word for setting in given for word in _count(setting)]
        others = [
            word for setting in (f"data.path={data}", *given) if not _count(setting) for word in ("--set", setting)
        ]
        code, text = run_python(
            "-c", "from bagpipe.cli import main; main()", "launch", "--json", "--run-dir", directory / "run",
            "--config", directory / "empty.toml", *counts, *others,
        )  # fmt: skip
    else:
        words = (HERE / "script.py", HERE / "data.parquet", directory / "checkpoints")
        if case.kind == "killed":
            code, text = run_python(*words, KILL_AT)
            if code != -9:
                return {"error": f"was to be killed, and ended with {code}: {text[-300:]}"}
        code, text = run_python(*words)
        if code == 0:
            return {"parameters_sha256": text.strip()}
    if code:
        return {"error": f"exit code {code}: {text[-300:]}"}
    found = json.loads(text)
    return {key: found[key] for key in COMPARED}


def settings_of(case: Case, now: bool) -> list[str]:
    """The settings of an entry, by the names of the start or by those of now."""
    settings = [*BASE, *case.settings]
    return renamed(settings) if now else settings


def _count(setting: str) -> list[str]:
    """`launch` takes the numbers of trainers and servers as options."""
    key, _, value = setting.partition("=")
    return [f"--{key}", value] if key in ("trainers", "servers") else []


def main() -> None:
    """Run them all."""
    results, cases, now = Path(sys.argv[1]), PART if "--part" in sys.argv else WHOLE, "--renamed" in sys.argv
    found = {}
    with tempfile.TemporaryDirectory(prefix="bg-", dir="/tmp") as temporary:  # short: Ray's sockets are below it
        os.environ["TMPDIR"] = temporary
        data = Path(temporary) / "data"
        write_data(data)
        for number, case in enumerate(cases):
            directory = Path(temporary) / str(number)
            directory.mkdir()
            began = time.monotonic()
            found[case.name] = run(case, directory, data, now)
            print(f"{time.monotonic() - began:6.1f} s  {case.name}", file=sys.stderr, flush=True)
    partial = results.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.rename(results)


if __name__ == "__main__":
    main()
