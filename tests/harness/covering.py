"""Few combinations of settings in which every two values of any two settings meet."""

from __future__ import annotations

import itertools

import pytest


def pairwise(choices, impossible=lambda _: False):
    """Combinations as dicts; `impossible` says of a dict with two settings whether they exclude each other."""
    names = list(choices)
    missing = {
        pair
        for a, b in itertools.combinations(names, 2)
        for pair in itertools.product([(a, x) for x in choices[a]], [(b, y) for y in choices[b]])
        if not impossible(dict(pair))
    }
    rows = []
    while missing:
        row = dict(min(missing, key=repr))
        for name in names:
            if name not in row:
                row[name] = _best(name, choices[name], row, missing, names, impossible)
        missing -= set(itertools.combinations([(name, row[name]) for name in names], 2))
        rows.append({name: row[name] for name in names})
    return rows


def few(number, of):
    """So many of the numbers from 0 on for `parametrize`, and the others up to `of` as long ones."""
    return [*range(number), *(pytest.param(other, marks=pytest.mark.long) for other in range(number, of))]


def covered(choices):
    """For `parametrize`: all combinations, of which those are long that no two values need in order to meet."""
    needed = pairwise(choices)
    return ",".join(choices), [
        pytest.param(*values, marks=() if dict(zip(choices, values, strict=True)) in needed else pytest.mark.long)
        for values in itertools.product(*choices.values())
    ]


def _best(name, values, row, missing, names, impossible):
    """The value that covers most pairs with what is in the row."""

    def new_pairs(value):
        pairs = [sorted(((name, value), item), key=lambda each: names.index(each[0])) for item in row.items()]
        return sum(tuple(pair) in missing for pair in pairs)

    possible = [value for value in values if not any(impossible(dict([(name, value), item])) for item in row.items())]
    return max(possible, key=new_pairs)
