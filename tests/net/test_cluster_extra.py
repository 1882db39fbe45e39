"""Without Ray everything but `bagpipe launch` works, and that says what to install."""

from __future__ import annotations

import json
import subprocess
import sys

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from bagpipe.cli import main
main()
"""


def bagpipe(*words):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_launch_without_ray_says_what_to_install():
    done = bagpipe("launch", "--servers", "2", "--json")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["error"] == "MissingExtraError"
    assert "pip install 'bagpipe[cluster]'" in said["message"]


def test_training_in_one_process_needs_no_ray(tmp_path):
    tiny = ("data.preset=tiny", "data.samples=600", "model.name=wide_deep", "model.dim=4", "iterations=2", "cache=2000")
    words = [word for each in tiny for word in ("--set", each)]
    done = bagpipe("train", "--json", "--run-dir", str(tmp_path / "run"), *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["iterations"] == 2
