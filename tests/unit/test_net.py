"""The net is free of the inside: its files import public names and the harness, and so outlive what is rebuilt."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NET = sorted(path for folder in ("net", "exact", "faults") for path in (TESTS / folder).glob("*.py"))
PUBLIC = {
    *("bagpipe", "bagpipe.cli", "bagpipe.config", "bagpipe.data", "bagpipe.errors", "bagpipe.failpoints"),
    *("bagpipe.metrics", "bagpipe.models", "bagpipe.optim", "bagpipe.reference", "bagpipe.state"),
}
NAMES = {*ast.literal_eval(
    next(
        ast.unparse(node.value)
        for node in ast.parse((TESTS.parent / "src" / "bagpipe" / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
)}  # fmt: skip


@pytest.mark.parametrize("path", NET, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_net_knows_public_names_only(path):
    inside = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bagpipe":
            public = NAMES | {name.partition(".")[2] for name in PUBLIC}
            inside += [node.module] if node.module not in PUBLIC else []
            inside += [each.name for each in node.names if node.module == "bagpipe" and each.name not in public]
        elif isinstance(node, ast.Import):
            inside += [each.name for each in node.names if each.name.startswith("bagpipe.") and each.name not in PUBLIC]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # of `monkeypatch.setattr`
            inside += [node.value] if re.fullmatch(r"bagpipe(\.\w+){2,}", node.value) else []
    assert inside == [], f"{path} reaches inside: let tests/harness give it what it needs"
