"""Places the roles of a run in a Ray cluster: servers far from each other, trainers and who feeds them together.

Resources are held by placement groups, so a run has all that it needs or does not begin. What is missing is said at
once; what another run has only just let go is waited for a moment (I7).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from bagpipe.cluster.resources import Need, Node, described, missing
from bagpipe.errors import ClusterError

SETTLE_S = 3.0
"""How long the news of freed resources may take."""
PLACE_S = 30.0


class Placement:
    """Resources for two kinds of roles, held until `close`."""

    def __init__(self, ray: ModuleType, spread: Sequence[Need], packed: Sequence[Need]) -> None:
        self._ray = ray
        self._groups: list[tuple[Sequence[Need], Any]] = []
        _await_free(ray, [*spread, *packed])
        try:
            for needs, strategy in ((spread, "SPREAD"), (packed, "PACK")):
                if needs:
                    self._reserve(needs, strategy)
        except BaseException:
            self.close()
            raise

    def options(self, need: Need) -> dict[str, Any]:
        """For the actor of this role."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, index = next((group, list(needs).index(need)) for needs, group in self._groups if need in needs)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        return {
            "num_cpus": need.cores,
            "num_gpus": need.gpus,
            "memory": need.memory_bytes,
            "scheduling_strategy": strategy,
        }

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        from ray.util import remove_placement_group

        while self._groups:
            _, group = self._groups.pop()
            with suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)

    def _reserve(self, needs: Sequence[Need], strategy: str) -> None:
        from ray.util import placement_group

        group = placement_group([need.bundle() for need in needs], strategy=strategy)
        self._groups.append((needs, group))
        if not group.wait(PLACE_S):
            raise ClusterError(
                f"Ray found no place for {', '.join(f'{need.role} ({need})' for need in needs)} within {PLACE_S:g} s; "
                f"{described(_nodes(self._ray))}"
            )


def _await_free(ray: ModuleType, needs: Sequence[Need]) -> None:
    """Raises ClusterError where the cluster has too little, however it is shared out."""
    until = time.monotonic() + SETTLE_S
    while (lacking := missing(needs, _nodes(ray))) is not None:
        hopeless = missing(needs, _nodes(ray, whole=True)) is not None
        if hopeless or time.monotonic() > until:
            raise ClusterError(
                f"the cluster has too little for this run: {lacking}. Add nodes or end what runs there, or ask for "
                "less with --trainers, --servers, --processors, --server-memory, --trainer-cores"
            )
        time.sleep(0.2)


def _nodes(ray: ModuleType, whole: bool = False) -> list[Node]:
    """The nodes with what is free on each, or all that each has."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    free = {} if whole else _free_by_node()
    return [Node(node["NodeManagerAddress"], free.get(node["NodeID"], node["Resources"])) for node in alive]


def _free_by_node() -> dict[str, dict[str, float]]:
    """Ray tells this in a module that is not public; without it the whole of a node counts as free."""
    try:
        state = importlib.import_module("ray._private.state")
        free: dict[str, dict[str, float]] = state.available_resources_per_node()
    except (ImportError, AttributeError):
        return {}
    return free
