"""A loader's batches, epoch after epoch, from any position on: what was trained is not trained again (I4).

A loader that knows positions (`bagpipe.data.Loader`) is told where to begin. Of any other the batches before the
position are read and passed over, so it must give the same ones again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader

from bagpipe.errors import BatchError, ConfigError, ModelError

State = Mapping[str, Any]


@runtime_checkable
class Positioned(Protocol):
    """A loader that can begin anywhere."""

    def __iter__(self) -> Iterator[Any]: ...

    def peek(self) -> Any:
        """A batch as they will come, or None if there is none; nothing is started or moved."""
        ...

    def repeated(self, times: int) -> Positioned:
        """The same, so many times as long."""
        ...

    def state_dict(self, given: int | None = None) -> dict[str, Any]:
        """The position this many batches after the one it begins at, or before it."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Begin at a position; an error if it belongs to something else."""
        ...


class LookBack(NamedTuple):
    """Who must see batches before the position of a run that is resumed."""

    first: Callable[[int], int]
    """From the position to the first batch that is needed."""
    show: Callable[[Any], object]
    """Called with each of them, in order."""


class Reading:
    """The batches of a run, numbered from its very beginning."""

    def __init__(self, loader: Iterable[Any], epochs: int, look_back: LookBack | None = None) -> None:
        """`look_back` is for who must see some of the batches before the position too."""
        self._look_back = look_back
        self.num_read = 0
        """Batches of the run that were read, those before the position included."""
        self._before = 0
        """Batches of the run before this reading began."""
        self._passed_over = 0
        """Of these the ones that the loader gives all the same."""
        self._shown_from = 0
        """The first of these that is shown."""
        self._clock: tuple[float, float | None] = (0.0, None)
        self._positioned: Positioned | None = None
        self._epochs: Iterator[Iterable[Any]]
        if isinstance(loader, Positioned):
            self._positioned = positioned = loader.repeated(epochs)
            example = positioned.peek()
            self.examples = [] if example is None else [example]
            self._epochs = (positioned for _ in range(1))
        else:
            self.examples, self._epochs = _open(loader, epochs)

    def __iter__(self) -> Generator[tuple[int, Any], None, None]:
        """Each batch with its number."""
        for epoch in self._epochs:
            reading = iter(epoch)
            try:
                while True:
                    self._clock = self._clock[0], time.perf_counter()
                    batch = next(reading, self)
                    self._clock = self.seconds(), None
                    if batch is self:
                        break
                    self.examples = []
                    number, self.num_read = self.num_read, self.num_read + 1
                    if number >= self._before:
                        yield number, batch
                    elif self._look_back is not None and number >= self._shown_from:
                        self._look_back.show(batch)
            finally:
                # Not left to garbage collection: its processes and threads end with it.
                if self._positioned is not None and hasattr(reading, "close"):
                    reading.close()
        if self.num_read < self._before:
            raise BatchError(
                f"training is to go on after {self._before} batches, and the loader gave {self.num_read}: give the "
                "loader that was trained with, or leave 'data' out of the saved state to begin with its first batch"
            )

    def state(self, batches: int) -> dict[str, Any]:
        """The position after so many batches of this reading; the last iteration may have had fewer than it could."""
        batches = min(batches, max(0, self.num_read - self._before))
        loader = None if self._positioned is None else self._positioned.state_dict(self._passed_over + batches)
        return {"batches": self._before + batches, "loader": loader}

    def resume(self, state: State) -> None:
        """Begin at a position; before the first batch."""
        batches = state.get("batches")
        if not isinstance(batches, int) or batches < 0:
            raise ModelError(f"the saved state is {batches!r} batches into the data: it is damaged")
        first = batches if self._look_back is None else self._look_back.first(batches)
        if self._positioned is not None and state.get("loader") is not None:
            self._positioned.load_state_dict(state["loader"])
            if first < batches:
                self._positioned.load_state_dict(self._positioned.state_dict(first - batches))
            self.num_read, self._passed_over = first, batches - first
        else:
            self.num_read, self._passed_over = 0, batches
        self._before, self._shown_from = batches, first

    def seconds(self) -> float:
        """How long the loader was waited for, so far."""
        waited, since = self._clock
        return waited if since is None else waited + time.perf_counter() - since

    def close(self) -> None:
        """Let go of the loader, so that its worker processes can end; one that knows positions still tells them."""
        self._epochs, self.examples = iter(()), []


def _open(loader: Iterable[Any], epochs: int) -> tuple[list[Any], Iterator[Iterable[Any]]]:
    """The first batch, if there is one, and all batches of each epoch."""
    if epochs > 1:
        _draw_privately(loader)
    first_epoch = iter(loader)
    if epochs > 1 and first_epoch is loader:
        raise ConfigError(
            f"epochs is {epochs}, but the loader is an iterator, which can be read once: give a list, a "
            "DataLoader, or another object whose iter() begins anew"
        )
    examples = list(islice(first_epoch, 1))
    return examples, chain([chain(examples, first_epoch)], (loader for _ in range(epochs - 1)))


def _draw_privately(loader: Iterable[Any]) -> None:
    """Let a shuffling DataLoader draw from a generator of its own: reading ahead must not touch the global one."""
    if not isinstance(loader, DataLoader) or loader.generator is not None:
        return
    loader.generator = torch.Generator()
    loader.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if getattr(sampler, "generator", loader) is None:
            sampler.generator = loader.generator  # type: ignore[union-attr]
