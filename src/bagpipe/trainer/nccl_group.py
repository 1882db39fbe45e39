"""A group of trainers over NCCL: tensors on CUDA devices. Untested: it was written without a GPU at hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from bagpipe.errors import ConfigError
from bagpipe.trainer.backend_group import BackendGroup
from bagpipe.trainer.collective import Pending, check_exchange, name_trainers
from bagpipe.trainer.meeting import Meeting, c10d

_POLL_S = 20e-6


class NcclGroup(BackendGroup):
    """One end of a group over NCCL."""

    def __init__(self, meeting: Meeting, purpose: str, deadline_s: float) -> None:
        kind: Any = getattr(c10d, "ProcessGroupNCCL", None)
        if kind is None or not torch.cuda.is_available():
            raise ConfigError("this machine has no NCCL or no CUDA device: use backend = 'gloo'")
        options = kind.Options()
        options._timeout = timedelta(seconds=deadline_s)
        store = c10d.PrefixStore(purpose, meeting.store)
        super().__init__(kind(store, meeting.rank, meeting.size, options), meeting, purpose, deadline_s)

    def exchange(self, send: Sequence[Tensor], receive: Sequence[Tensor], what: str) -> Pending:
        """As the protocol; NCCL skips empty tensors."""
        check_exchange(self, send, receive, what)
        self.check(what)
        return _NcclTransfer(self, what, "alltoall", list(receive), list(send))

    def all_reduce(self, buffer: Tensor, what: str) -> Pending:
        """As the protocol."""
        check_exchange(self, [buffer] * self.size, [buffer] * self.size, what)
        self.check(what)
        return _NcclTransfer(self, what, "allreduce", [buffer])

    def disconnect(self) -> None:
        """End the waits of all threads and peers."""
        with suppress(RuntimeError):
            self.backend.abort()


class _NcclTransfer:
    """An operation under way."""

    def __init__(self, group: NcclGroup, what: str, operation: str, *buffers: list[Tensor]) -> None:
        self._group, self._buffers = group, buffers
        self._what = f"{what} with {name_trainers(sorted(group.others))}"
        self._work: Any = None
        group.hold(self)
        try:
            self._work = getattr(group.backend, operation)(*buffers)
        except RuntimeError as error:
            group.release(self)
            raise group.fail(self._what, error, 0.0) from error

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        begin = time.monotonic()
        try:
            while self._work is not None and not self._work.is_completed():  # its wait only orders streams
                if time.monotonic() > begin + self._group.deadline_s:
                    raise RuntimeError("Timed out")
                time.sleep(_POLL_S)
            if self._work is not None:
                self._work.wait()
        except RuntimeError as error:
            raise self._group.fail(self._what, error, time.monotonic() - begin) from error
        finally:
            self._work = None
            self._group.release(self)
