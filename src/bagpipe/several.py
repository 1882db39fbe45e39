"""A user's script on several trainers: what `bagpipe.prepare` does under `bagpipe launch --trainers N`.

The first trainer reads its loader, divides each batch and plans for all; the others look at one batch of their own
loader, to see what batches are made of, and are sent their parts. Whatever the trainers want differently is refused
before anything is trained (I8), and one that fails tells the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn

from bagpipe._version import __version__
from bagpipe.config import cache_size, warn_of_idle_rows
from bagpipe.data.tree_wire import types_in
from bagpipe.errors import CheckpointError
from bagpipe.layers import Binding
from bagpipe.layout import RowLayout
from bagpipe.oracle.assign import Assigner
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.service import PlanSettings
from bagpipe.trainer.agreement import check_same, tell_all
from bagpipe.trainer.joint_update import Peers
from bagpipe.trainer.script_plans import ScriptPlans, ServedPlans, SharedLoader
from bagpipe.trainer.source import Opened, PlanStream, Source
from bagpipe.wire.keys import Address
from bagpipe.wire.listener import on_socket
from bagpipe.wire.stream import SocketNetwork

if TYPE_CHECKING:
    from bagpipe.build import Spec
    from bagpipe.checkpointing import Saving
    from bagpipe.cluster.context import Launch
    from bagpipe.trainer.stages import Driver


def open_loader(launch: Launch, loader: Iterable[Any], accumulate: int) -> Source:
    """The loader of this trainer; only the first one's will be read beyond its first batch."""
    return Source(loader, accumulate) if launch.trainer else SharedLoader(loader, accumulate)


def share_plans(launch: Launch, spec: Spec, saving: Saving | None, driver: Driver) -> Opened:
    """Join the other trainers, see that all want the same, and open this one's plans."""
    config, source, plan = launch.config, spec.source, spec.plans
    assert source is not None
    settings = PlanSettings(
        spec.binding.tables, tuple(layout.width for layout in spec.layouts), plan.cache, plan.lookahead,
        plan.policy_name, spec.accumulate, trainers=launch.trainers, assign=config.assign, design=config.sync.design,
        delayed=config.sync.delayed, options=plan.options,
        move_costs=tuple(layout.move_cost for layout in spec.layouts) if config.sync.moving else (),
    )  # fmt: skip
    wanted = _described(settings) | {"rows": [_wanted(layout) for layout in spec.layouts]}
    point = "" if saving is None else saving.point
    with ExitStack() as stack:
        groups = launch.open_groups()
        peers = Peers(groups, config.sync.design, config.sync.delayed, config.sync.moving)
        stack.push(peers.leave)
        served = None
        if isinstance(source, SharedLoader):
            warn_of_idle_rows(settings.design, launch.trainers, settings.policy)
            served = _serve(launch, source, spec.binding, settings)
            stack.callback(served.close)
        address = "" if served is None else served.address
        said = {"address": address, "point": point, "wanted": wanted}
        texts = tell_all(groups.critical, driver, json.dumps(said), "what is trained")
        told = [json.loads(text) for text in texts]
        check_same([each["wanted"] for each in told])
        _check_points([each["point"] for each in told])
        plans: PlanStream
        if served is not None:
            plans, capacity = served, served.capacity
        else:
            plans = _join(launch, source, told[0]["address"])
            stack.callback(plans.close)
            capacity = plans.described.capacity
        # Else the first one may fail and leave while another still looks for its plans, until that one's deadline.
        tell_all(groups.critical, driver, "", "the connection to the plans")
        stack.pop_all()
        return Opened(plans, capacity, peers)


def _serve(launch: Launch, source: SharedLoader, binding: Binding, settings: PlanSettings) -> ServedPlans:
    oracle = make_oracle(
        settings.tables, settings.widths, cache_size(settings.cache), source.first_ids(), source.other_ids(),
        lookahead=settings.lookahead, policy=settings.policy, options=settings.options, trainers=settings.trainers,
        uses_ahead=settings.uses_ahead, design=settings.design,
    )  # fmt: skip
    try:
        features = [table.features for table in settings.tables]
        source.share(_ending(binding), Assigner(settings.assign, settings.trainers, launch.config.seed, features))
        partition = settings.partition(oracle)
        address = Address(launch.hosts[0], 0)
        listen = on_socket(str(address), security=launch.listener)
        described = settings.described(list(oracle.places.capacity))
        return ServedPlans(listen, source, oracle, partition, described, run=launch.run, compress=not address.is_local)
    except BaseException:
        oracle.close()
        raise


def _join(launch: Launch, source: Source, address: str) -> ScriptPlans:
    types = types_in(source.example)
    source.close()
    network = SocketNetwork(launch.security)
    return ScriptPlans(network, address, source.adapter, types, run=launch.run, trainer=launch.trainer)


def _check_points(points: Sequence[str]) -> None:
    """CheckpointError if a trainer would go on from elsewhere: each has looked for itself."""
    for rank, point in enumerate(points):
        if point != points[0]:
            raise CheckpointError(
                f"trainer 0 would go on from {points[0]}, trainer {rank} from {point}: give all the same resume, and "
                "see that their machines see the same files"
            )


def _ending(binding: Binding) -> list[str]:
    """Features whose offsets end with the number of ids: those of layers with include_last_offset."""
    layers = [layer for layer in binding.layers if isinstance(layer.module, nn.EmbeddingBag)]
    tables = {layer.table for layer in layers if getattr(layer.module, "include_last_offset", False)}
    return [name for number in sorted(tables) for name in binding.tables[number].features]


def _described(settings: PlanSettings) -> dict[str, object]:
    """The settings of plans as people know them."""
    return {
        "the release of bagpipe": __version__,
        "the list of tables": [[table.name, table.rows, list(table.features)] for table in settings.tables],
        "cache": settings.cache,
        "lookahead": settings.lookahead,
        "policy": settings.policy,
        "policy_options": asdict(settings.options),
        "accumulate": settings.accumulate,
        "assign": settings.assign,
        "sync.design": settings.design,
        "sync.delayed": settings.delayed,
        "sync.moving": bool(settings.move_costs),
    }


def _wanted(layout: RowLayout) -> str:
    """What the rows of a table are, and how they will be updated."""
    optimizer = layout.optimizer
    lr = "by a schedule" if callable(optimizer.lr) else optimizer.lr
    settings = {name: getattr(optimizer, name) for name in optimizer.settings}
    return f"{layout.label}, lr {lr}, {settings}, after {optimizer.updates} updates"
