import inspect
import re
from pathlib import Path

import bagpipe
from bagpipe import errors

ROOT = Path(__file__).parents[2]


def test_the_public_names_are_sorted_and_documented():
    names = bagpipe.__all__
    assert names == sorted(names)
    for name in names:
        thing = getattr(bagpipe, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), name
            assert thing.__module__.startswith("bagpipe"), name


def test_the_tree_of_errors_is_drawn_in_full():
    drawn = set(re.findall(r"\w+Error", errors.__doc__))
    there = {
        name for name, thing in vars(errors).items() if inspect.isclass(thing) and thing.__module__ == errors.__name__
    }
    assert drawn == there
    listed = (ROOT / "docs" / "errors.md").read_text()
    assert {name for name in there if name != "BagpipeError"} <= set(re.findall(r"`(\w+Error)`", listed))


def test_every_module_says_what_it_is_for():
    for path in (ROOT / "src" / "bagpipe").rglob("*.py"):
        first = path.read_text().lstrip()
        assert first.startswith('"""'), path
        assert "TODO" not in first.split('"""')[1], path


def test_the_links_of_the_documentation_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
