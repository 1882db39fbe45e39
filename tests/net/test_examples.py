"""The first two examples differ in a few lines and end with the same parameters; the third can be ended."""

from __future__ import annotations

import difflib
import re
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


def test_preparing_a_script_takes_the_lines_that_the_readme_counts():
    plain, fast = (code(name) for name in ("plain_pytorch.py", "prepared.py"))
    changes = [line for line in difflib.ndiff(plain, fast) if line[:1] in "+-" and line[2:].strip()]
    added = [line[2:] for line in changes if line.startswith("+")]
    changed = len(changes) - len(added)  # what goes, another line comes for
    assert sum(line.endswith("# changed") for line in added) == changed
    assert sum(line.endswith("# new") for line in added) == len(added) - changed
    readme = " ".join((EXAMPLES.parent / "README.md").read_text().split())
    said = re.search(r"(\d+) lines? (?:is|are) new and (\d+) (?:is|are) changed", readme)
    assert said
    assert [int(number) for number in said.groups()] == [len(added) - changed, changed]


def test_both_scripts_end_with_equal_parameters(tmp_path):
    said, plain = run("plain_pytorch.py", tmp_path / "plain.pt")
    also_said, fast = run("prepared.py", tmp_path / "fast.safetensors")
    assert said == also_said
    assert set(plain) == set(fast)
    for name in plain:
        torch.testing.assert_close(fast[name], plain[name], rtol=1e-4, atol=1e-5, msg=name)
    assert plain["user.weight"].abs().sum() > 0


@pytest.mark.parametrize("name", ["plain_pytorch.py", "prepared.py", "resumed.py"])
def test_an_example_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 60


@pytest.mark.long
def test_a_script_that_is_ended_and_started_again_ends_with_the_same_bits(tmp_path):
    def resumed(name, *last):
        command = [sys.executable, str(EXAMPLES / "resumed.py"), str(tmp_path / name), str(tmp_path / f"{name}.out")]
        return subprocess.run([*command, *last], capture_output=True, text=True, timeout=120)

    whole = resumed("whole")
    begins, first, *later = whole.stdout.splitlines()
    assert (begins, first.partition(":")[0]) == ("begins", "iteration 20")
    assert resumed("parts", "27").stdout.splitlines() == [begins, first]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["00000010", "00000020"]
    middle = resumed("parts", "44")
    assert (middle.returncode, middle.stdout.splitlines()) == (3, ["goes on after 20 iterations", later[0]])
    assert resumed("parts").stdout.splitlines() == ["goes on after 40 iterations", *later[1:]]
    out = tmp_path / "parts.out"
    assert out.read_bytes() == (tmp_path / "whole.out").read_bytes()
    out.unlink()
    assert resumed("parts").stdout == "goes on after 60 iterations\n", "it was ended right before the export"
    assert out.read_bytes() == (tmp_path / "whole.out").read_bytes()
