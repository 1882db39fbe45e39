"""`bagpipe bench` finds the benchmarks of a checkout, and says where they are if there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import bagpipe

BENCH = [sys.executable, "-c", "from bagpipe.cli import main; main()", "bench"]


def run(*words, package, directory):
    environment = {**os.environ, "PYTHONPATH": str(package)}
    return subprocess.run([*BENCH, *words], cwd=directory, env=environment, capture_output=True, text=True, check=False)


def test_a_checkout_has_its_benchmarks_wherever_the_command_is_given(tmp_path):
    found = run("--list", "--json", package=Path(bagpipe.__file__).parents[1], directory=tmp_path)
    assert found.returncode == 0, found.stderr
    assert '"terabyte"' in found.stdout


def test_an_installed_package_says_where_the_benchmarks_are(tmp_path):
    package = tmp_path / "lib" / "site-packages"
    shutil.copytree(Path(bagpipe.__file__).parent, package / "bagpipe", ignore=shutil.ignore_patterns("__pycache__"))
    found = run("generator", package=package, directory=tmp_path)
    assert found.returncode != 0
    assert found.stdout == ""
    assert all(word in found.stderr for word in ("benchmarks", "source tree", "make install"))
