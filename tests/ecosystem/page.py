"""Writes docs/ecosystem.md: `python tests/ecosystem/page.py --write` trains every model and fills its table."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path += [str(ROOT / "tests"), str(ROOT / "src")]

import torch  # noqa: E402

from bagpipe.errors import BagpipeError  # noqa: E402
from ecosystem import libraries  # noqa: E402
from ecosystem.models import DEEPCTR, RECHUB, RECHUB_LEFT_OUT, TORCHFM, Case  # noqa: E402
from ecosystem.of_recbole import RECBOLE, RECBOLE_LEFT_OUT  # noqa: E402
from ecosystem.training import OPTIMIZERS, Trial, distance, others_of, train_plain, train_prepared  # noqa: E402

PAGE = ROOT / "docs/ecosystem.md"
CASES = [*DEEPCTR, *RECHUB, *TORCHFM, *RECBOLE]
LEFT_OUT = {"torch-rechub": RECHUB_LEFT_OUT, "RecBole": RECBOLE_LEFT_OUT}
"""What has nothing to compare, or needs what these tests don't install."""
COLUMNS = [
    "library",
    "model",
    "trains",
    *(f"{name}: {of}" for name in OPTIMIZERS for of in ("Bagpipe", *others_of(name))),
]
HEAD = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]


def main() -> None:
    """Print the table, or write it into the page."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    libraries.load()
    rows = []
    for case in CASES:
        rows.append(row_of(case))
        print(rows[-1], flush=True)
    if "--write" in sys.argv:
        before, _, after = parts_of(PAGE.read_text())
        PAGE.write_text("\n".join([*before, *HEAD, *rows, *after, ""]))


def row_of(case: Case) -> str:
    """What the page says of a model."""
    with contextlib.redirect_stdout(io.StringIO()):  # some models print
        trial = case.make()
        if case.why:
            with contextlib.suppress(BagpipeError):
                train_prepared(trial, "SGD")
                raise AssertionError(f"{case.id} is not refused")
            cells = [f"refused: {case.why} (`{case.error}`)", *[""] * (len(COLUMNS) - 3)]
        else:
            cells = ["yes", *(f"{figure:.0e}" for optimizer in OPTIMIZERS for figure in figures_of(trial, optimizer))]
    return f"| {' | '.join([case.library, case.name, *cells])} |"


def figures_of(trial: Trial, optimizer: str) -> list[float]:
    """How far Bagpipe is from plain PyTorch, and plain PyTorch from itself."""
    plain = train_plain(trial, optimizer)
    others = [train_plain(trial, optimizer, **other) for other in others_of(optimizer).values()]
    return [distance(plain, found) for found in (train_prepared(trial, optimizer), *others)]


def models_of(page: str) -> list[tuple[str, str, bool]]:
    """The models of the page, and whether they are refused."""
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in parts_of(page)[1]]
    return [(library, name, trains.startswith("refused: ")) for library, name, trains in rows]


def parts_of(page: str) -> tuple[list[str], list[str], list[str]]:
    """Its lines before, in and after the table of models."""
    lines = page.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| library | model |"))
    end = lines.index("", first)
    return lines[:first], lines[first + len(HEAD) : end], lines[end:]


if __name__ == "__main__":
    main()
