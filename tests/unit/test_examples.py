"""The two examples differ in a few lines and end with the same parameters."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, path):
    command = [sys.executable, str(EXAMPLES / name), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout, torch.load(path) if path.suffix == ".pt" else load_file(path)


def code(name):
    """The lines after a script's docstring."""
    return (EXAMPLES / name).read_text().split('"""', 2)[2].splitlines()


def test_accelerating_a_script_takes_at_most_six_lines():
    plain, fast = (code(name) for name in ("plain_pytorch.py", "accelerated.py"))
    changes = [line for line in difflib.ndiff(plain, fast) if line[:1] in "+-" and line[2:].strip()]
    added = [line[2:] for line in changes if line.startswith("+")]
    assert len(added) <= 6
    assert len(changes) - len(added) <= len(added)
    assert all(line.endswith(("# new", "# changed")) for line in added), added


def test_both_scripts_end_with_equal_parameters(tmp_path):
    said, plain = run("plain_pytorch.py", tmp_path / "plain.pt")
    also_said, fast = run("accelerated.py", tmp_path / "fast.safetensors")
    assert said == also_said
    assert set(plain) == set(fast)
    for name in plain:
        torch.testing.assert_close(fast[name], plain[name], rtol=1e-4, atol=1e-5, msg=name)
    assert plain["user.weight"].abs().sum() > 0


@pytest.mark.parametrize("name", ["plain_pytorch.py", "accelerated.py"])
def test_an_example_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 60
