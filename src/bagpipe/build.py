"""From what is to be trained to its training loop: one builder for scripts, configured runs, threads and launches.

A `World` opens what differs between them: where plans come from, where rows live and who else trains. Everything that
can be refused is refused before the model is touched (I8); the pipeline starts with the first batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from bagpipe.config import cache_size
from bagpipe.errors import ConfigError
from bagpipe.layers import Binding
from bagpipe.layout import RowLayout
from bagpipe.optim import PerTable, RowOptimizer
from bagpipe.policies import make_policy
from bagpipe.policies.base import Policy
from bagpipe.policy_options import DEFAULTS, PolicyOptions
from bagpipe.store.mapped import RESIDENT_BYTES_MAX
from bagpipe.trainer.background import Background
from bagpipe.trainer.loop import TrainLoop
from bagpipe.trainer.pipeline import DEPTH
from bagpipe.trainer.source import Source

if TYPE_CHECKING:
    from bagpipe.checkpointing import Checkpointing
    from bagpipe.world import OpenStore, World

LOAD_ROUND_S = 10.0
"""From one meeting to the next while the first trainer loads rows: well below the deadline of an exchange."""


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """What the oracle is to do; refused at once if it can't."""

    cache: int | str
    lookahead: int | Literal["auto"] = "auto"
    policy: str | Policy = "lookahead"
    options: PolicyOptions = DEFAULTS

    def __post_init__(self) -> None:
        if self.lookahead != "auto":
            at_least("lookahead", self.lookahead, 1, ", or 'auto'")
        if self.policy == "nocache" and self.lookahead not in ("auto", 1):
            raise ConfigError(
                f"policy 'nocache' keeps nothing, so lookahead ({self.lookahead}) has no effect: leave it out"
            )
        cache_size(self.cache)
        make_policy(self.policy, self.options)

    @property
    def policy_name(self) -> str:
        """Of one that is an object, that of its class."""
        return self.policy if isinstance(self.policy, str) else self.policy.name


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is trained, and how: alike on all trainers, each of which has a model of its own."""

    model: nn.Module
    binding: Binding
    rows: RowOptimizer | PerTable
    layouts: Sequence[RowLayout]
    plans: PlanChoice
    source: Source | None
    """Reads the loader; None: another process does."""
    store: str | Path | OpenStore = "memory"
    resident_bytes_max: int = RESIDENT_BYTES_MAX
    """Of rows in files."""
    accumulate: int = 1
    device: torch.device | None = None
    depth: int = DEPTH
    threads: int | None = None
    check: bool = False
    once: bool = False
    """Whether there is only one epoch."""
    data: str = ""
    """What tells the data and their order from others, where that is known."""


def build_loop(spec: Spec, world: World, checkpoint: Checkpointing | None = None) -> TrainLoop:
    """The training loop of one trainer, before its first epoch; the embedding layers of the model are swapped."""
    policy = make_policy(spec.plans.policy, spec.plans.options)
    if spec.source is not None:
        spec.source.tables = spec.binding.tables
        if policy.samples:
            spec.source.check_sample(spec.plans.options.sample)
    driver, loading = world.driver(), Background("bagpipe-loading", threads=world.works_beside)
    saving = world.plan_saving(spec, checkpoint)
    with ExitStack() as stack:
        stack.callback(loading.close)
        opened = world.open_plans(spec, saving, driver)
        stack.callback(opened.source.close)
        if opened.peers is not None:
            stack.push(opened.peers.leave)
        store = world.open_rows(spec, saving)
        stack.callback(store.close)
        if saving is not None and saving.loads and world.trainer == 0:
            # Which has deadlines of its own, for as long as stores read nothing.
            loading.start("loading rows", lambda: saving.restore(store), progress=time.monotonic)
        loop = TrainLoop(
            spec.model, spec.binding, spec.rows, spec.layouts, opened, store, driver, device=spec.device,
            depth=spec.depth, threads=spec.threads or torch.get_num_threads(), check=spec.check,
            checkpointer=None if saving is None else world.checkpointer(saving, store),
            ahead=policy.lead(spec.plans.lookahead, spec.plans.options),
            reopen=None if spec.once else lambda: world.open_plans(spec, saving, driver),
        )  # fmt: skip
        if saving is not None and saving.loads:
            while world.any_busy(loop, loading.is_busy(LOAD_ROUND_S), "the rows to begin with"):
                pass
        loading.close()
        stack.pop_all()
    return loop


def at_least(name: str, value: object, least: int, others: str = "") -> None:
    """ConfigError for what is no whole number of this size."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}: give a whole number of at least {least}{others}")
