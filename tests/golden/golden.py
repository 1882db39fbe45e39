"""Golden digests: the same runs with the release at which the redesign began and with this tree must give equal bits.

`make golden` builds that release from its commit, with an environment of its own from its own constraints, runs the
entries of cases.py with both, and compares digests and traffic (I1 across releases). What the start gave is kept on
disk (`BAGPIPE_GOLDEN`, by default in the user's cache directory), by machine, since dense bits depend on the processor.
Differences that were made on purpose stand in differences.toml. `--part` runs the part of them that CI has time for,
and ends with a word and without an error where the start can't be built.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

START = "a49fb28e1ec5ebc8e8f461299a5dcdf5f4a0c7d2"
"""The commit where the redesign begins."""
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("cases.py", "side.py", "script.py", "data.parquet")
DEADLINE_S = 1800.0


class CantBeMade(Exception):
    """What the start gives is not known here."""


def say(text: str) -> None:
    print(text, flush=True)


def cache() -> Path:
    """Where what the start gave is kept."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bagpipe-golden"
    return Path(os.environ.get("BAGPIPE_GOLDEN") or default)


def key() -> str:
    """Tells machines, interpreters and entries apart."""
    with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as lines:
        processor = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    digest = hashlib.sha256(f"{processor} {platform.python_version()}".encode())
    for name in FILES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def run(*words: object, directory: Path = ROOT, **environment: str) -> None:
    ended = subprocess.run(
        [*map(str, words)], cwd=directory, env={**os.environ, **environment}, stdout=sys.stderr, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip
    if ended.returncode:
        raise CantBeMade(f"{' '.join(map(str, words[:4]))} ... ended with {ended.returncode}")


def python_of_start(home: Path) -> Path:
    """An interpreter that has the release at the start, and no other."""
    python = home / "venv" / "bin" / "python"
    if (home / "built").exists():
        return python
    tree = home / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    archive = home / "tree.tar"
    say(f"building the release at {START[:12]} in {home}; this is kept")
    run("git", "archive", "--output", archive, START)
    run("tar", "-xf", archive, "-C", tree)
    run(sys.executable, "-m", "venv", "--clear", home / "venv")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", tree / "constraints.txt", f"{tree}[cluster]", directory=home)
    (home / "built").touch()
    return python


def results_of_start(part: bool) -> dict[str, dict[str, object]]:
    """What the start gives on this machine."""
    home = cache() / START[:12]
    whole, partly = home / f"{key()}.json", home / f"{key()}-part.json"
    for known in (whole, partly) if part else (whole,):
        if known.exists():
            return json.loads(known.read_text())
    try:
        python = python_of_start(home)
        run(python, HERE / "side.py", partly if part else whole, *["--part"] * part, directory=home, PYTHONPATH="")
    except (OSError, subprocess.SubprocessError) as error:
        raise CantBeMade(str(error)) from error
    return json.loads((partly if part else whole).read_text())


def results_of_now(part: bool) -> dict[str, dict[str, object]]:
    """What this tree gives."""
    found = cache() / f"now-{os.getpid()}.json"
    found.parent.mkdir(parents=True, exist_ok=True)
    try:
        run(sys.executable, HERE / "side.py", found, "--renamed", *["--part"] * part, PYTHONPATH=str(ROOT / "src"))
        return json.loads(found.read_text())
    finally:
        found.unlink(missing_ok=True)


def compare(
    start: dict[str, dict[str, object]], now: dict[str, dict[str, object]], purpose: dict[str, dict[str, object]]
) -> list[str]:
    """What differs, one line each; entries that are named in `purpose` and do not differ are wrong too."""
    wrong = [f"differences.toml names {name!r}, and there is no such entry" for name in purpose if name not in start]
    for name, found in now.items():
        before = start.get(name, {"error": "no such entry"})
        allowed = set(purpose.get(name, {}).get("values", ()))
        differing = {value for value in before.keys() | found.keys() if before.get(value) != found.get(value)}
        if "error" in found or "error" in before:
            wrong.append(f"{name}: start {before.get('error', 'ended well')}; now {found.get('error', 'ended well')}")
        wrong += [
            f"{name}: {value} was {before.get(value)}, and is {found.get(value)}"
            for value in sorted(differing - allowed - {"error"})
        ]
        wrong += [f"{name}: {value} is to differ, and does not" for value in sorted(allowed - differing)]
    return wrong


def main() -> int:
    part = "--part" in sys.argv
    try:
        start = results_of_start(part)
    except CantBeMade as error:
        say(f"golden digests are not compared: {error}")
        return 0 if part else 1
    now = results_of_now(part)
    with (HERE / "differences.toml").open("rb") as file:
        purpose = tomllib.load(file)
    wrong = compare(start, now, {name: why for name, why in purpose.items() if not part or name in now})
    for line in wrong:
        say(line)
    say(f"golden: {len(now)} entries, {len(wrong)} differences from {START[:12]} that nobody meant")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
