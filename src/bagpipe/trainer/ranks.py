"""Ranks of torch.distributed, which know nothing of each other's rows, and are refused."""

from __future__ import annotations

import torch

from bagpipe.errors import ConfigError


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
