"""What each role of a run needs, and whether a cluster has it: too little is said at once, never waited for (I7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

CORES, GPUS, MEMORY = "CPU", "GPU", "memory"
"""As Ray calls them."""
_WORDS = {CORES: "cores", GPUS: "GPUs", MEMORY: "memory"}


@dataclass(frozen=True, slots=True)
class Need:
    """What one role takes of the node that it runs on."""

    role: str
    """Such as "server 1"."""
    cores: float = 0.0
    gpus: float = 0.0
    memory_bytes: int = 0

    def bundle(self) -> dict[str, float]:
        """As Ray wants it; what is not needed is left out."""
        wanted = {CORES: self.cores, GPUS: self.gpus, MEMORY: float(self.memory_bytes)}
        return {name: amount for name, amount in wanted.items() if amount > 0}

    def __str__(self) -> str:
        return ", ".join(f"{_WORDS[name]} {_shown(name, amount)}" for name, amount in self.bundle().items())


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    name: str
    free: Mapping[str, float]
    """What no other actor holds."""


def missing(needs: Sequence[Need], nodes: Sequence[Node]) -> str | None:
    """What these needs lack on these nodes, in words; None if nothing shows."""
    lacking = [
        f"{_WORDS[name]}: {_shown(name, wanted)} needed, {_shown(name, free)} free"
        for name in _WORDS
        if (wanted := _total(need.bundle() for need in needs).get(name, 0.0))
        > (free := _total(node.free for node in nodes).get(name, 0.0))
    ]
    if lacking:
        return "; ".join(lacking)
    for need in needs:
        if not any(_fits(need, node.free) for node in nodes):
            return f"{need.role} needs {need} on one node, and none has it free: {described(nodes)}"
    return None


def described(nodes: Sequence[Node]) -> str:
    """What is free on each node."""
    return "; ".join(
        f"{node.name} has "
        + ", ".join(f"{word} {_shown(name, node.free.get(name, 0.0))}" for name, word in _WORDS.items())
        for node in nodes
    )


def _fits(need: Need, free: Mapping[str, float]) -> bool:
    return all(free.get(name, 0.0) >= amount for name, amount in need.bundle().items())


def _total(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _shown(name: str, amount: float) -> str:
    return f"{amount / 1e9:.3g} GB" if name == MEMORY else f"{amount:g}"
