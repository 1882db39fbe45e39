"""Draws the house: sizes, layers and cycles of the package from its source alone, and lines by part.

python tools/house.py [PACKAGE] [--json]; `make house`. Nothing is imported: what it says is read from the files.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PARTS: Mapping[str, tuple[str, ...]] = {
    "oracle": (
        *("oracle/", "policies/", "policy_options.py", "kernels/"),
        *("rows/", "optim.py", "schedules.py", "layout.py", "initial.py", "arrays.py"),
    ),
    "rows": (
        *("store/", "checkpoint/", "checkpointing.py", "resuming.py", "os_errors.py", "whole_file.py"),
        *("trainer/checkpointer.py", "trainer/state.py", "trainer/saved.py"),
    ),
    "processes": ("wire/", "server/", "cluster/", "recovery.py", "failpoints.py"),
    "data": ("data/",),
    "loop": (
        *("trainer/", "loop/", "sync/", "run/", "models/", "device/"),
        *("prepared.py", "script.py", "row_parameter.py", "adapt.py", "layers.py", "embedding.py"),
        *("row_ops.py", "cache.py", "pooling.py", "checker.py"),
        *("reference.py", "state.py", "training.py", "together.py"),
        *("several.py", "split.py", "job.py", "opening.py", "results.py", "metrics.py", "types.py", "table.py"),
        *("allocator.py",),
    ),
    "rest": ("",),
}
"""The files of each part of the redesign: the first that fits counts, so each file counts once."""


class House:
    """The modules of a package, and which of them import which."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, root.name
        self.files = {self._name(path): path for path in sorted(root.rglob("*.py"))}
        self.lines = {name: path.read_text().count("\n") for name, path in self.files.items()}
        self.imports: dict[str, set[str]] = defaultdict(set)
        self.functions: list[tuple[int, int, str]] = []
        self.classes: Counter[str] = Counter()
        self.array_types = 0
        for name, path in self.files.items():
            text = path.read_text()
            self.array_types += text.count("= NDArray[") + text.count("= npt.NDArray[")
            self._read(name, ast.parse(text))

    def _name(self, path: Path) -> str:
        return ".".join((self.top, *path.relative_to(self.root).with_suffix("").parts)).removesuffix(".__init__")

    def _read(self, name: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] += 1
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                parameters = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                self.functions.append((length, parameters, f"{name}:{node.name}"))
        for node in _at_import(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == self.top:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                self.imports[name] |= {each if each in self.files else str(node.module) for each in names}
            elif isinstance(node, ast.Import):
                self.imports[name] |= {each.name for each in node.names if each.name.split(".")[0] == self.top}

    def folder(self, name: str) -> str:
        """The folder of a module right below the package; "(root)" for what lies in the package itself."""
        relative = self.files[name].relative_to(self.root)
        return relative.parts[0] if len(relative.parts) > 1 else "(root)"

    def part(self, name: str) -> str:
        """The part of the redesign that a module belongs to."""
        path = self.files[name].relative_to(self.root).as_posix()
        return next(part for part, starts in PARTS.items() if path.startswith(starts))

    def reached_from(self, entry: str) -> set[str]:
        """All modules that importing this one imports."""
        seen: set[str] = set()
        waiting = [entry]
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self.files:
                continue
            seen.add(name)
            above = name.split(".")[:-1]
            waiting += [".".join(above[: end + 1]) for end in range(len(above))]
            waiting += self.imports[name]
        return seen

    def figures(self) -> dict[str, Any]:
        """All that is measured."""
        folders = sorted({self.folder(name) for name in self.files})
        between: dict[str, set[str]] = defaultdict(set)
        for name, targets in self.imports.items():
            between[self.folder(name)] |= {self.folder(each) for each in targets if each in self.files}
        entry = next((name for name in (f"{self.top}.api", f"{self.top}.loop.api") if name in self.files), self.top)
        reached = self.reached_from(entry)
        return {
            "files": len(self.files),
            "lines": sum(self.lines.values()),
            "lines_by_part": self._sizes(self.part, PARTS),
            "root_files": sum(self.folder(name) == "(root)" for name in self.files),
            "module_cycles": cycles(self.imports, self.files),
            "folder_cycles": cycles(between, folders),
            "entry": entry,
            "entry_imports": len(reached),
            "entry_lines": sum(self.lines[name] for name in reached),
            "class_names_twice": sum(count > 1 for count in self.classes.values()),
            "imported_by_one": sum(
                sum(name in targets for targets in self.imports.values()) == 1 for name in self.files
            ),
            "array_types": self.array_types,
            "folders": self._sizes(self.folder, folders),
            "longest_functions": [(length, name) for length, _, name in sorted(self.functions, reverse=True)[:5]],
            "most_parameters": sorted(((count, name) for _, count, name in self.functions), reverse=True)[:5],
        }

    def _sizes(self, group: Any, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Files and lines of each group."""
        return {
            each: (
                sum(group(name) == each for name in self.files),
                sum(lines for name, lines in self.lines.items() if group(name) == each),
            )
            for each in names
        }


def _at_import(tree: ast.AST) -> Iterable[ast.AST]:
    """What runs when the module is imported: not in functions, nor for type checkers alone."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _at_import(child)


def cycles(imports: Mapping[str, Iterable[str]], names: Iterable[str]) -> list[list[str]]:
    """Groups of names that all reach each other (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in imports.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in names:
        if name not in index:
            visit(name)
    return found


def main() -> None:
    """Print the figures."""
    given = [word for word in sys.argv[1:] if not word.startswith("-")]
    root = Path(given[0] if given else Path(__file__).parents[1] / "src" / "bagpipe").resolve()
    sys.setrecursionlimit(10_000)
    figures = House(root).figures()
    if "--json" in sys.argv:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for each, (files, lines) in value.items():
                print(f"  {each:<12} {files:>4} files {lines:>7,} lines")
        else:
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
