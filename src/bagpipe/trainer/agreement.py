"""What trainers tell each other before they train together, and whether they want the same (I8)."""

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


def _exchange(group: Collective, driver: Driver, sent: Tensor, room: list[Tensor], what: str) -> None:
    pending = group.exchange([sent] * group.size, room, what)
    driver.wait(Wait(what, pending.ready))
    pending.wait()
