"""A loader's batches, epoch after epoch, from any position on: what was trained is not trained again (I4).

A loader that knows positions (`bagpipe.data.Loader`) is told where to begin. Of any other the batches before the
position are read and passed over, in the order of that epoch: generators are put where they were when it began.
"""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from bagpipe.errors import BatchError, ModelError
from bagpipe.loaders import Positioned, State
from bagpipe.trainer.state import generator_states, set_generator_states

DRAWS = (
    "the loader draws from torch's global random generator while it reads a batch, and it is read ahead of training: "
    "if the model draws from it too, as dropout does, both see other numbers than in plain training. Let the data be "
    "read by a process of its own (num_workers=1), or draw from a torch.Generator of its own"
)


class LookBack(NamedTuple):
    """Who must see batches before the position of a run that is resumed."""

    first: Callable[[int], int]
    """From the position to the first batch that is needed."""
    show: Callable[[Any], object]
    """Called with each of them, in order."""


class Reading:
    """The batches of one epoch, numbered from its beginning."""

    def __init__(self, batches: Iterable[Any], look_back: LookBack | None = None, state: State | None = None) -> None:
        """From a position on, if a `state` is given; `look_back` is for who must see some of the batches before it."""
        self._look_back = look_back
        self._before: int = 0 if state is None else state["batches"]
        """Batches of the epoch before this reading began."""
        self._shown_from = self._before if look_back is None else look_back.first(self._before)
        """The first of these that is shown."""
        self.num_read = 0
        """Batches of the epoch that were read, those before the position included."""
        self._positioned = batches if isinstance(batches, Positioned) else None
        if self._positioned is not None and state is not None and state.get("loader") is not None:
            self._positioned.load_state_dict(state["loader"])
            if self._shown_from < self._before:
                self._positioned.load_state_dict(self._positioned.state_dict(self._shown_from - self._before))
            self.num_read = self._shown_from
        self._passed_over = self._before - self.num_read
        """Batches before the position that the loader gives all the same."""
        self._clock: tuple[float, float | None] = (0.0, None)
        self._batches: Iterable[Any] = batches
        if self._positioned is None:
            # The first one here, in the caller's thread: samplers draw their seeds from the global generator with it.
            reading = iter(batches)
            self._batches = chain(list(islice(reading, 1)), reading)

    def __iter__(self) -> Generator[tuple[int, Any], None, None]:
        """Each batch with its number."""
        reading = iter(self._batches)
        try:
            while True:
                self._clock = self._clock[0], time.perf_counter()
                batch = next(reading, self)
                self._clock = self.seconds(), None
                if batch is self:
                    break
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
                "loader that was trained with"
            )

    def state(self, batches: int) -> dict[str, Any]:
        """The position after so many batches of this reading; the last iteration may have had fewer than it could."""
        batches = min(batches, max(0, self.num_read - self._before))
        loader = None if self._positioned is None else self._positioned.state_dict(self._passed_over + batches)
        return {"batches": self._before + batches, "loader": loader}

    def seconds(self) -> float:
        """How long the loader was waited for, so far."""
        waited, since = self._clock
        return waited if since is None else waited + time.perf_counter() - since

    def close(self) -> None:
        """Let go of the loader, so that its worker processes can end; one that knows positions still tells them."""
        self._batches = ()


class Epochs:
    """A loader that is read once an epoch, after its first batch was looked at."""

    def __init__(self, loader: Iterable[Any]) -> None:
        if not isinstance(loader, Iterable):
            raise BatchError(f"the loader is a {type(loader).__name__}: give something that yields batches")
        self.loader = loader
        self._rest: Iterator[Any] | None = loader if isinstance(loader, Iterator) else None
        self._looked_at: list[Any] = []
        self._num_given = 0
        self._generators: list[torch.Generator] = []
        self._states: deque[list[Tensor]] = deque()
        """Of these, after the last batch that was given, and after each that was read ahead of it."""
        self._start = loader.state_dict(0) if isinstance(loader, Positioned) else None
        self.order: dict[str, Any] | None = None
        """Where all generators were when the epoch began, of a loader that draws its order from them."""

    def _noted(self) -> Iterator[Any]:
        self._states.clear()
        for batch in self.loader:
            self._states.append([generator.get_state() for generator in self._generators])
            yield batch

    def given(self) -> None:
        """The next of the batches that were read is given."""
        if len(self._states) > 1 and self._num_given:
            self._states.popleft()
        self._num_given += 1

    def broken_off(self) -> None:
        """What was read ahead is read no more: generators of the loader's own are where the last batch left them."""
        if self._num_given and self._states:
            for generator, state in zip(self._generators, self._states[0], strict=True):
                generator.set_state(state)
        self._states.clear()

    def first(self) -> list[Any]:
        """The first batch, if there is one; nothing of what the loader will give, and no random number, is used up."""
        if self._rest is not None:
            self._looked_at = list(islice(self._rest, 1))
            return self._looked_at
        if isinstance(self.loader, Positioned):
            example = self.loader.peek()
            return [] if example is None else [example]
        with _as_it_was(self.loader):
            looking = iter(_only_looked_at(self.loader))
            first = list(islice(looking, 1))
            before = torch.get_rng_state()  # a sampler has drawn its seed, if it does
            next(looking, None)
            in_another_process = isinstance(self.loader, DataLoader) and self.loader.num_workers
            if not in_another_process and not torch.equal(before, torch.get_rng_state()):
                warnings.warn(DRAWS, stacklevel=3)
            return first

    def check(self, state: State) -> None:
        """An error if a position can't be one of this loader's."""
        batches = state.get("batches")
        if not isinstance(batches, int) or batches < 0:
            raise ModelError(f"the saved state is {batches!r} batches into the data: it is damaged")
        if isinstance(self.loader, Positioned) and state.get("loader") is not None:
            self.loader.load_state_dict(state["loader"])

    def next(self, order: State | None = None) -> Iterable[Any]:
        """Those of the next epoch; where one goes on, in the `order` that it had."""
        self._num_given = 0
        if isinstance(self.loader, Iterator):
            if self._rest is None:
                raise BatchError(
                    "the loader is an iterator, which can be read once: give a list, a DataLoader, or another object "
                    "whose iter() begins anew"
                )
            rest, self._rest = self._rest, None
            return chain(self._looked_at, rest)
        if isinstance(self.loader, Positioned):
            assert self._start is not None
            self.loader.load_state_dict(self._start)
            return self.loader
        self._generators = _own_generators(self.loader)
        if order is not None:
            set_generator_states(order["all"])
            for generator, state in zip(self._generators, order["own"], strict=True):
                generator.set_state(state)
        self.order = {"all": generator_states(), "own": [each.get_state() for each in self._generators]}
        return self._noted() if self._generators else self.loader


def _own_generators(loader: object) -> list[torch.Generator]:
    """Those that a DataLoader and its samplers draw from, and nobody else."""
    if not isinstance(loader, DataLoader):
        return []
    parts = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    own = {id(each): each for each in (getattr(part, "generator", None) for part in parts)}
    return [each for each in own.values() if isinstance(each, torch.Generator)]


def _only_looked_at(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of a loader, without starting the worker processes of a DataLoader, which may be kept for its epochs."""
    if not isinstance(loader, DataLoader):
        return iter(loader)
    if isinstance(loader.dataset, IterableDataset):
        return iter(copy.copy(loader))
    if loader.batch_sampler is None:
        return (loader.collate_fn(loader.dataset[index]) for index in loader.sampler)
    fetch = getattr(loader.dataset, "__getitems__", None) or (
        lambda indices: [loader.dataset[each] for each in indices]
    )
    return (loader.collate_fn(fetch(indices)) for indices in loader.batch_sampler)


@contextmanager
def _as_it_was(loader: Iterable[Any]) -> Iterator[None]:
    """Give back what reading a loader may change: all random generators, and what it and its parts keep for
    themselves, such as the number of the epoch or an order that they shuffle."""
    parts = [loader, *(getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler"))]
    parts += [getattr(part, "sampler", None) for part in parts[1:]]
    kept = [(vars(part), dict(vars(part))) for part in parts if hasattr(part, "__dict__")]
    values = list({id(value): value for _, attributes in kept for value in attributes.values()}.values())
    orders = [(value, copy.copy(value)) for value in values if _is_order(value)]
    generators = [value for value in [torch.default_generator, *values] if isinstance(value, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    of_own = [(value, value.getstate()) for value in values if isinstance(value, random.Random)]
    of_arrays = [value.bit_generator for value in values if isinstance(value, np.random.Generator)]
    states_of_arrays = [each.state for each in of_arrays]
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what data sets draw from
    try:
        yield
    finally:
        for now, before in kept:
            if now.keys() != before.keys() or any(now[name] is not before[name] for name in before):
                now.clear()
                now.update(before)
        for order, before in orders:
            order[:] = before
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        for own, was in of_own:
            own.setstate(was)
        for bits, of_bits in zip(of_arrays, states_of_arrays, strict=True):
            bits.state = of_bits
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def _is_order(value: object) -> bool:
    """Whether this may be an order of samples or batches, to be shuffled in place."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu" and value.flags.writeable
    return isinstance(value, list)
