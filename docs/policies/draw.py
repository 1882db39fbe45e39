"""Draws the pictures of docs/policies.md: what each policy has in its cache, on one small trace.

    python docs/policies/draw.py

Rows of the pictures are rows of a table, the most used ones at the top; columns are iterations. The pictures show plans
that the oracle made, nothing is drawn by hand.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import POLICIES, PolicyOptions

ROWS, BATCH, ITERATIONS, CACHE, LOOKAHEAD = 16, 3, 36, 9, 6
SIZE, LEFT, TOP = 13, 8, 8
STYLE = (
    ".f{fill:#c8500a}.u{fill:#0b62a8}.r{fill:#a9cbe8}.g{fill:#8883}text{font:11px sans-serif;fill:#666}"
    "@media(prefers-color-scheme:dark){.f{fill:#f2955a}.u{fill:#5aaeee}.r{fill:#27567c}text{fill:#aaa}}"
)


def trace() -> list[np.ndarray]:
    """Batches in which row r is used with weight 1 / (r + 1)."""
    random = np.random.default_rng(7)
    weights = 1 / (np.arange(ROWS) + 1)
    return [random.choice(ROWS, BATCH, replace=False, p=weights / weights.sum()) for _ in range(ITERATIONS)]


def plans_of(policy: str) -> list[Plan]:
    """The plans of the trace."""
    capacity = ROWS if policy == "ideal" else CACHE
    options = PolicyOptions(sample=8, ways=2)
    oracle = Oracle([OracleTable("only", ROWS)], [capacity], LOOKAHEAD, policy, options, ahead=1)
    return [plan for plan, _ in oracle.plans(([ids], None) for ids in trace())]


def picture(policy: str) -> str:
    """Who is where, as SVG."""
    cells: dict[str, list[str]] = {"f": [], "u": [], "r": [], "g": []}
    cached: set[int] = set()
    fetched = hits = 0
    for plan in plans_of(policy):
        came = set(plan.fetch.ids.tolist())
        used = set(plan.rows.ids.tolist())
        cached = (cached - set(plan.victims.ids.tolist())) | came
        fetched, hits = fetched + len(came), hits + plan.hits
        for row in range(ROWS):
            kind = ("f" if row in came else "u") if row in used else ("r" if row in cached else "g")
            cells[kind].append(_square(plan.iteration, row, 5 if kind == "g" else 1))
            if row in came - used:
                cells["f"].append(_square(plan.iteration, row, 4))
        cached -= set(plan.evict.ids.tolist())
    width, height = 2 * LEFT + ITERATIONS * SIZE, TOP + ROWS * SIZE + 24
    drawn = "".join(f'<path class="{kind}" d="{"".join(parts)}"/>' for kind, parts in reversed(cells.items()))
    said = f"{policy}: {fetched} rows fetched, {hits} found in the cache"
    text = f'<text x="{LEFT}" y="{height - 7}">{said}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{said}"><style>{STYLE}</style>{drawn}{text}</svg>\n'
    )


def _square(column: int, row: int, inset: int) -> str:
    side = SIZE - 2 * inset
    return f"M{LEFT + column * SIZE + inset} {TOP + row * SIZE + inset}h{side}v{side}h-{side}z"


if __name__ == "__main__":
    for name in POLICIES:
        (Path(__file__).parent / f"{name}.svg").write_text(picture(name), encoding="utf-8")
