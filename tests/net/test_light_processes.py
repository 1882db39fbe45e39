"""Processes that never use PyTorch don't load it: each such process costs a second and 200 MB less."""

import json
import subprocess
import sys
from textwrap import indent

import pytest

import bagpipe
from harness import seams

LIGHT_COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "help of server": ["server", "--help"],
    "help of launch": ["launch", "--help"],
    "help of data": ["data", "prepare", "criteo", "--help"],
}


def loaded_by(code, *arguments):
    """The top-level packages in a new interpreter after it ran this."""
    program = (
        "import json, sys\nfrom contextlib import suppress\n"
        f"with suppress(SystemExit):\n{indent(code, '    ')}\n"
        "print('\\n' + json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    child = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr.decode()
    return set(json.loads(child.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module",
    ["bagpipe", "bagpipe.cli", *seams.LIGHT_MODULES],
)
def test_what_never_trains_is_imported_without_pytorch(module):
    loaded = loaded_by(f"import {module}")
    assert "bagpipe" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("command", LIGHT_COMMANDS.values(), ids=LIGHT_COMMANDS)
def test_help_comes_without_pytorch_and_without_a_compiler(command):
    loaded = loaded_by("from bagpipe.cli import main; main()", *command)
    assert "typer" in loaded
    assert not loaded & {"torch", "numba", "pyarrow", "ray"}


@pytest.mark.parametrize("command", ["train", "verify", "compare", "launch"])
def test_a_wrong_setting_is_refused_without_pytorch(command):
    loaded = loaded_by("from bagpipe.cli import main; main()", command, "--set", "iterations=many")
    assert "pydantic" in loaded
    assert "torch" not in loaded


def test_keys_are_made_without_pytorch(tmp_path):
    loaded = loaded_by("from bagpipe.cli import main; main()", "keys", "new", str(tmp_path / "run"))
    assert (tmp_path / "run.server").exists()
    assert "torch" not in loaded


def test_a_server_that_served_has_not_loaded_pytorch():
    """Its kernels are called, too: some modules are imported only then."""
    for store in ("memory", "mapped"):
        loaded = loaded_by(seams.SERVES_AND_STOPS.format(store=store))
        assert "numba" in loaded
        assert "torch" not in loaded


def test_a_data_processor_that_gave_a_batch_has_not_loaded_pytorch():
    loaded = loaded_by(seams.GIVES_A_BATCH)
    assert "numba" in loaded
    assert "torch" not in loaded


def test_every_public_name_is_there_and_is_the_thing_itself():
    for name, thing in seams.DEFINED.items():
        assert getattr(bagpipe, name) is thing
    assert set(bagpipe.__all__) <= set(dir(bagpipe))
    with pytest.raises(AttributeError, match="has no attribute 'prepared_model'"):
        bagpipe.prepared_model  # noqa: B018 - the look-up is the test


def test_no_module_hides_a_public_name_whatever_is_imported_first():
    names = "bagpipe.export, bagpipe.prepare, bagpipe.clip_grad_norm_"
    loaded_by(f"import {seams.HOMES}; assert all(callable(each) for each in ({names}))")


def test_a_star_import_gives_the_public_names():
    loaded_by("exec('from bagpipe import *', space := {}); import bagpipe; assert set(bagpipe.__all__) <= set(space)")


def test_a_script_that_trains_alone_loads_what_it_needs():
    code = (
        "import torch, bagpipe\n"
        "net = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 4, mode='sum'), torch.nn.Linear(4, 1))\n"
        "net, optimizer, loader = bagpipe.prepare(\n"
        "    net, torch.optim.SGD(net.parameters(), lr=0.1), [torch.arange(8).reshape(4, 2)] * 3, cache=50)\n"
        "for batch in loader:\n"
        "    net(batch).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "loader.close()\n"
        "print(json.dumps(sorted(name for name in sys.modules if name.startswith('bagpipe'))))\n"
    )
    program = "import json, sys\n" + code
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr.decode()
    ours = json.loads(child.stdout.splitlines()[-1])
    assert seams.TRAINING_MODULE in ours
    assert len(ours) <= 90
    assert not [name for name in ours if name.split(".")[1:2] in (["cluster"], ["wire"], ["server"], ["data"])]
