"""Files and names that the documentation mentions exist."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("src", "tests", "benchmarks", "examples", "tools", "docs")
PATH = re.compile(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
FILE = re.compile(r"`([\w/-]+\.py)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
NAME = re.compile(r"`(bagpipe(?:\.\w+)+)")


def is_file_somewhere(name):
    """Modules are named from the package on, and after another of the same folder without it."""
    if "/" in name:
        return any((folder / name).is_file() for folder in (ROOT, ROOT / "src" / "bagpipe"))
    return any(next((ROOT / folder).rglob(name), None) for folder in FOLDERS)


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
def test_what_a_page_names_exists(page):
    text = page.read_text()
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    missing += [name for name in FILE.findall(text) if not is_file_somewhere(name)]
    missing += [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    missing += [name for name in NAME.findall(text) if not is_defined(name)]
    assert missing == []
