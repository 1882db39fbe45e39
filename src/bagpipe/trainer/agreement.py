"""What trainers tell each other before they train together, and whether they want the same (I8).

Trainers are those of `bagpipe launch`. Ranks of torch.distributed know nothing of each other's rows, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bagpipe.errors import ConfigError, PipelineError
from bagpipe.trainer.collective import Collective
from bagpipe.trainer.stages import Driver, Wait

BYTES_MAX = 1 << 22


def tell_all(group: Collective, driver: Driver, text: str, what: str) -> list[str]:
    """What each trainer says."""
    data = text.encode()
    if len(data) > BYTES_MAX:
        raise PipelineError(f"{what}: {len(data)} bytes to tell, {BYTES_MAX} are possible")
    lengths = [torch.empty(1) for _ in range(group.size)]
    _exchange(group, driver, torch.tensor([float(len(data))]), lengths, f"the length of {what}")
    padded = np.frombuffer(data.ljust(-(-len(data) // 4) * 4, b" "), np.float32).copy()
    room = [torch.empty(-(-int(length) // 4)) for length in lengths]
    _exchange(group, driver, torch.from_numpy(padded), room, what)
    return [
        words.numpy().tobytes()[: int(length)].decode(errors="replace")
        for words, length in zip(room, lengths, strict=True)
    ]


def check_same(told: Sequence[Mapping[str, object]]) -> None:
    """ConfigError if a trainer has other settings than the first one."""
    for rank, settings in enumerate(told):
        for name in dict.fromkeys([*told[0], *settings]):
            if settings.get(name) != told[0].get(name):
                raise ConfigError(
                    f"{name} differs between trainers: {told[0].get(name)} on trainer 0, {settings.get(name)} on "
                    f"trainer {rank}: let the script do the same on all"
                )


def refuse_ranks(world_size: str | None = None) -> None:
    """ConfigError if this trainer, which is alone, is one of several ranks: each would train rows of its own.

    `world_size` is the variable that torchrun sets.
    """
    remedy = "bagpipe does not exchange rows between them, so they would drift apart: start the script with"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            raise ConfigError(
                f"this process is rank {torch.distributed.get_rank()} of a torch.distributed group of {ranks}, and "
                f"{remedy} 'bagpipe launch --trainers {ranks} SCRIPT', without init_process_group and "
                "DistributedDataParallel"
            )
    if world_size is not None and world_size.strip().isdecimal() and int(world_size) > 1:
        raise ConfigError(
            f"the environment has WORLD_SIZE={world_size}, as torchrun sets it for several ranks, and {remedy} "
            f"'bagpipe launch --trainers {int(world_size)} SCRIPT' instead of torchrun, or unset WORLD_SIZE if this "
            "process is the only one"
        )


def _exchange(group: Collective, driver: Driver, sent: Tensor, room: list[Tensor], what: str) -> None:
    pending = group.exchange([sent] * group.size, room, what)
    driver.wait(Wait(what, pending.ready))
    pending.wait()
