"""The ways in which trainers can divide the work of keeping rows up to date; all give the same bits (I1)."""

from __future__ import annotations

from typing import Literal, NamedTuple

Design = Literal["owned", "partitioned", "replicated", "lrpp"]


class Rules(NamedTuple):
    """What makes a design."""

    copies: bool = False
    """All trainers update all rows, each its copy. Otherwise a row has one owner at a time: by the votes of its uses,
    as `assign=aware` finds homes; when it is fetched, who will use it most while it is cached, as far as is seen."""
    users_read: bool = False
    """A row's first users read its vector from the store; otherwise its owner sends it to them."""
    lone: bool = False
    """A row that one trainer uses and that then leaves is that trainer's alone, even where all have copies."""
    moves: bool = False
    """A row may go, with its state, to a user whose next two uses save more than that."""


RULES: dict[Design, Rules] = {
    "owned": Rules(users_read=True, moves=True),
    "partitioned": Rules(),
    "replicated": Rules(copies=True),
    "lrpp": Rules(copies=True, lone=True),
}
DESIGNS: tuple[Design, ...] = tuple(RULES)
