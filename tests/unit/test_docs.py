"""What README.md and docs/ say that a test can look up: versions, files, settings, commands, code."""

import ast
import importlib
import re
import shlex
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
import torch
import typer
from torch import nn

import bagpipe
from bagpipe.cli import app
from bagpipe.config import DEFAULT_PRESET, DEFAULT_SAMPLES, Config, parse_config
from bagpipe.data import generated, write
from bagpipe.doctor import examine
from bagpipe.models import build_model
from harness.plain import loss_fn, make_batches, make_net

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page, *languages):
    return [text for language, text in FENCE.findall(page.read_text()) if language in languages]


def test_one_python_is_claimed_checked_and_run():
    claimed = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["mypy"]["python_version"] == claimed
    assert f"Programming Language :: Python :: {claimed}" in PROJECT["project"]["classifiers"]
    readme, quickstart = ((ROOT / name).read_text() for name in ("README.md", "docs/quickstart.md"))
    assert f"Python {claimed}" in readme
    assert f"Python {claimed}" in quickstart
    assert sys.version_info >= tuple(map(int, claimed.split(".")))


def test_the_pinned_torch_is_the_one_that_the_readme_names():
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"PyTorch {pinned}" in (ROOT / "README.md").read_text()


def test_lower_bounds_that_are_named_are_those_of_the_project():
    quickstart = (ROOT / "docs/quickstart.md").read_text()
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["cluster"]]
    bounds = dict(each.split(">=") for each in wanted)
    for name, package in (("PyTorch", "torch"), ("Typer", "typer"), ("Ray", "ray")):
        assert re.search(rf"{name}\s+{re.escape(bounds[package])}\b", quickstart), package
    torch = next(check for check in examine() if check.name == "torch")
    assert torch.ok, "the doctor wants no other"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    text = page.read_text()
    named = re.findall(r"`((?:tests|examples|docs|src)/[\w./-]+)`", text)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert [link for link in links if link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_that_a_page_links_to_are_there(page):
    for target, heading in re.findall(r"\]\(([\w./]*)#([^)\s]+)\)", page.read_text()):
        text = (page.parent / target if target else page).read_text()
        titles = [
            re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)
        ]
        assert heading in titles, f"{target}#{heading}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_a_page_is_python_and_names_what_there_is(page):
    for code in blocks(page, "python"):
        tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("bagpipe."):
                found = importlib.import_module("bagpipe")
                for name in ast.unparse(node).split(".")[1:]:
                    found = getattr(found, name)


CODE = [
    pytest.param(page, code, id=f"{page.name}-{n}") for page in PAGES for n, code in enumerate(blocks(page, "python"))
]


def names_of(code):
    """What a block takes for granted."""
    model, loader = make_net(), make_batches()
    frame = None
    if "Shards(" in code and "write(" not in code:
        data = generated("criteo-kaggle-like", 600, seed=0)
        write(data, "data/kaggle")
        model = build_model("wide_deep", data.tables, data.num_dense, 4, "meta")
    if "from_frame(" in code:
        columns = {
            "clicked": [True, False],
            "hour": [0.5, 0.1],
            "user": [3, 5],
            "city": ["x", "y"],
            "tags": [["t"], []],
        }
        frame = pd.DataFrame({name: values * 400 for name, values in columns.items()})
        model = nn.ModuleDict({name: nn.EmbeddingBag(9, 4, mode="sum") for name in ("user", "city", "tags")})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    return {
        "bagpipe": bagpipe, "torch": torch, "MyModel": make_net, "model": model, "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "loader": loader, "batch": loader[0],
        "valid_loader": make_batches(2, seed=7), "evaluate": lambda model, batches: [model(batch) for batch in batches],
        "loss_fn": loss_fn, "frame": frame, "resumed": Path("run.pt").exists(),
    }  # fmt: skip


@pytest.mark.parametrize(("page", "code"), CODE)
def test_code_of_a_page_runs(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    less = code.replace("1_000_000", "2_000").replace("900_000", "1_800")
    for _ in range(2 if "resume" in code else 1):  # and goes on from what the first run has left
        names = names_of(code)
        exec(compile(less, str(page), "exec"), names)
        if isinstance(names["loader"], bagpipe.PreparedLoader):
            assert names["loader"].loop.done or names["resumed"]
            names["loader"].close()
            names["loader"].loop.store.close()


def commands(page):
    """Every line of a page that calls `bagpipe`, in words."""
    for text in blocks(page, "sh", ""):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition("#")[0], posix=True)
            if words[:1] and words[0].rpartition("/")[2] == "bagpipe" and "..." not in words:
                yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_have_the_options_that_it_gives_them(page):
    for words in commands(page):
        command, rest = typer.main.get_command(app), list(words)
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        if command.name == "launch":  # what follows the script is the script's
            rest = rest[: next((at + 1 for at, word in enumerate(rest) if word.endswith(".py")), len(rest))]
        assert [word for word in rest if word.startswith("--") and word not in known] == [], words
        for name, setting in pairwise(rest):
            if name == "--set":
                require_setting(setting.partition("=")[0])


def require_setting(path):
    section = Config
    for name in path.split("."):
        assert name in section.model_fields, path
        section = section.model_fields[name].annotation


def test_the_configuration_written_out_is_the_default():
    (text,) = blocks(ROOT / "docs/quickstart.md", "toml")
    written = tomllib.loads(text)
    assert parse_config(written | {"data": {}}) == Config()
    default = {"preset": DEFAULT_PRESET, "samples": DEFAULT_SAMPLES, "held_out": Config().data.held_out}
    assert written["data"] == default


def test_what_make_test_leaves_out_is_said_where_it_is_named():
    left_out = re.search(r"^test:.*\n\t.*-m 'not long'", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert left_out
    for name in ("README.md", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "every test\n" not in text
        assert "all tests but those that take minutes" in text
        assert "make chaos" in text


def is_defined(name):
    """Whether it is a module, or what a module has."""
    found, parts = importlib.import_module("bagpipe"), name.split(".")
    for number, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:number]))
            except ImportError:
                return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_that_a_page_has_are_defined(page):
    names = re.findall(r"`(bagpipe(?:\.\w+)+)", page.read_text())
    assert [name for name in names if not is_defined(name)] == []
