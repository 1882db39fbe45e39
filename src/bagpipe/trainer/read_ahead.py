"""The batches that were read ahead of training, and the loader that writes into them (I8).

A loader may give the same buffers again and again, with new numbers in them. That does no harm in a plain loop; read
ahead, batches would have the labels of later ones. So what a batch holds is summed when it is read, and again when it
is given to the training loop, and when a later batch lies in the same memory while this one is trained: one that has
changed is refused. Memory that is given again as it was (a mask that all batches share, another epoch over slices of
one tensor) is nobody's harm.

Ids need none of this: they are used up, or copied, before the loader is asked for the next batch.
"""

from __future__ import annotations

import array
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from bagpipe.adapt import Path, is_keyed, parts_of
from bagpipe.checkpoint.tree import octets
from bagpipe.errors import BatchError
from bagpipe.loaders import Rereadable

BUFFERS = (bytearray, memoryview, array.array)
PLAIN = {NoneType, bool, bytes, float, int, str}
PARTS_OF_TENSORS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.jagged: ("values", "offsets"),
}
"""The methods that give the tensors of those which have no memory themselves."""


class Layout(NamedTuple):
    """Where the numbers of a tensor or an array lie; of a container only where that is."""

    start: int
    kind: Any
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    """In bytes."""

    def are_other_rows(self, other: Layout) -> bool:
        """Whether both are lines of one column-major matrix, and no line is of both."""
        if self.kind != other.kind or self.strides != other.strides or not self.strides or self.strides[0] <= 0:
            return False
        lines, rest = divmod(abs(other.start - self.start), self.strides[0])
        first = self if self.start < other.start else other
        last = self.shape[0] + other.shape[0] + lines
        return (
            rest == 0 and lines >= first.shape[0] and all(part >= last * self.strides[0] for part in self.strides[1:])
        )


class Part(NamedTuple):
    """A tensor, an array or a container in a batch, and what it held when it was read."""

    path: Path
    value: Any
    layout: Layout
    content: Any
    share: int = 0
    """Of which trainer's part of the batch; they have the same paths."""

    def has_changed(self, later: Part) -> bool:
        """Whether it holds something else now that `later` was read, which lies among it."""
        if self.layout == later.layout:
            return bool(self.content != later.content)
        if self.layout.are_other_rows(later.layout) or not _share_memory(self.value, later.value):
            return False
        return bool(self.content != _content(self.value))


class Held:
    """What a batch holds besides its ids; kept by whoever is still to train it, or does so now."""

    __slots__ = ("__weakref__", "error", "number", "parts", "spans", "walk")

    def __init__(self, number: int, walk: Callable[[], list[Part]]) -> None:
        self.number, self.walk, self.parts = number, walk, walk()
        self.spans: NDArray[np.int64] = np.array([_span(part.layout) for part in self.parts], np.int64).reshape(-1, 2)
        """The first byte of each part, and the one after its last."""
        self.error: BatchError | None = None
        """Says that it was overwritten."""

    def compare(self) -> None:
        """Note whether the batch, which is about to be given, is still what was read; the script may change it then."""
        now = {(part.share, part.path): part.content for part in self.walk()}
        for part in self.parts:
            if self.error is None and now.get((part.share, part.path), part.content) != part.content:
                self.error = self.overwritten(part, "since it was read")

    def overwritten(self, part: Part, when: str) -> BatchError:
        """What to raise for a part that has changed."""
        return BatchError(
            f"the loader has overwritten {'.'.join(part.path) or 'all'!r} of batch {self.number} {when}. Batches are "
            "read ahead of training, so each needs memory of its own: let the loader yield tensor.clone() or "
            "array.copy() of what it fills again, and new dicts, lists and objects"
        )


class ReadAhead:
    """The batches of a loader that are still to be trained."""

    def __init__(self, loader: Iterable[Any]) -> None:
        # No code of the user runs while a list is read.
        self._watched = type(loader) not in (list, tuple) and not isinstance(loader, Rereadable)
        self._batches: list[weakref.ref[Held]] = []
        self._pinned: list[Held] = []
        self._ids: set[Path] = set()

    def leave_out(self, paths: Iterable[Path]) -> None:
        """Do not look at the ids that are at these places of a batch, alone or with their offsets."""
        self._ids = {(*path, *step) for path in paths for step in ((), ("values",), ("0",))}

    def pin(self) -> None:
        """The loader is about to be asked for a batch: those that are to be trained now are what it may overwrite."""
        alive = [(batch, reference) for reference in self._batches if (batch := reference()) is not None]
        self._pinned, self._batches = [batch for batch, _ in alive], [reference for _, reference in alive]

    def unpin(self) -> None:
        """The loader will not be asked again."""
        self._pinned = []

    def hold(self, number: int, *kept: Any) -> Held | None:
        """Another batch was read, of which this is kept; BatchError if an earlier one was overwritten for it."""
        if not self._watched:
            return None
        new = Held(number, partial(_all_parts, kept, self._ids))
        earlier, self._pinned = self._pinned, []
        for batch, part, later in _overlaps(earlier, new):
            if batch.error is None and part.has_changed(later):
                batch.error = batch.overwritten(part, f"while it read batch {number}, which lies in the same memory")
        for batch in earlier:
            if batch.error is not None:
                raise batch.error
        self._batches.append(weakref.ref(new))
        return new


def _overlaps(earlier: list[Held], new: Held) -> Iterator[tuple[Held, Part, Part]]:
    """Parts of earlier batches that lie where the new one has some."""
    if not earlier or not new.parts:
        return
    before = np.concatenate([batch.spans for batch in earlier])
    if not len(before):
        return
    order = np.argsort(before[:, 0])
    starts, stops = before[order, 0], np.maximum.accumulate(before[order, 1])
    behind = np.searchsorted(starts, new.spans[:, 1])
    suspects = np.flatnonzero((behind > 0) & (stops[behind - 1] > new.spans[:, 0]))
    if not len(suspects):
        return
    parts = [(batch, part) for batch in earlier for part in batch.parts]
    for suspect in suspects.tolist():
        start, stop = new.spans[suspect]
        for place in np.flatnonzero((before[:, 0] < stop) & (before[:, 1] > start)).tolist():
            yield *parts[place], new.parts[suspect]


def _all_parts(kept: Iterable[Any], ids: Collection[Path]) -> list[Part]:
    seen: set[int] = set()
    return [part._replace(share=share) for share, each in enumerate(kept) for part in _parts(each, (), seen, ids)]


def _parts(value: Any, path: Path, seen: set[int], ids: Collection[Path], *, in_object: bool = False) -> Iterator[Part]:
    if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
        value = torch.empty(0, dtype=torch.uint8).set_(value)  # the same bytes, as a tensor
    layout = None if path in ids else _layout(value)
    if layout is not None:
        yield Part(path, value, layout, _content(value))
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    # What an object keeps for itself, a cache for example, may change; a dict or list of the batch itself may not.
    if (
        isinstance(value, BUFFERS)
        or (isinstance(value, np.ndarray) and value.dtype.kind == "O")
        or (not in_object and (isinstance(value, dict | list | deque | set) or dataclasses.is_dataclass(value)))
    ):
        yield Part(path, value, Layout(id(value), type(value)), _content(value))
    if isinstance(value, list | tuple) and PLAIN.issuperset(map(type, value)):
        return
    in_object = in_object or not (isinstance(value, Mapping | list | tuple) or dataclasses.is_dataclass(value))
    for key, part in _inside(value):
        if type(part) not in PLAIN:
            yield from _parts(part, (*path, key), seen, ids, in_object=in_object)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    names: Iterable[str] = ()
    if isinstance(value, Tensor):
        names = PARTS_OF_TENSORS.get(value.layout, ())
    elif is_keyed(value):
        names = ("values", "lengths", "weights_or_none")
    elif isinstance(value, deque | set):
        yield from ((str(number), part) for number, part in enumerate(list(value)))
    elif isinstance(value, np.ndarray):
        yield from ((str(number), part) for number, part in enumerate(value.reshape(-1).tolist()))
    else:
        yield from parts_of(value)
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield name, getattr(value, name)
    for name in names:
        if hasattr(value, name):
            yield name, getattr(value, name)()


def _layout(value: Any) -> Layout | None:
    """Where a tensor or an array lies; None if it has no numbers, or none that can be found."""
    if isinstance(value, np.ndarray):
        if not value.nbytes or value.dtype.hasobject:
            return None
        return Layout(value.__array_interface__["data"][0], value.dtype, value.shape, value.strides)
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested or value.is_meta:
        return None
    if not value.numel():
        return None
    try:
        start, size = value.data_ptr(), value.element_size()
    except RuntimeError:
        return None  # of a kind that has no memory itself
    return Layout(start, value.dtype, tuple(value.shape), tuple(stride * size for stride in value.stride()))


def _span(layout: Layout) -> tuple[int, int]:
    steps = [(length - 1) * stride for length, stride in zip(layout.shape, layout.strides, strict=True)]
    size = layout.kind.itemsize if isinstance(layout.kind, torch.dtype | np.dtype) else 1
    return layout.start + sum(min(0, step) for step in steps), layout.start + sum(max(0, step) for step in steps) + size


def _content(value: Any) -> Any:
    """What tells whether something has changed: of numbers a checksum, of containers what is in them."""
    if isinstance(value, Tensor):
        if not value.is_cpu or value.is_quantized:
            return 0 if value.is_inference() else value._version
        once = value.detach()[_once(value.stride())].resolve_conj().resolve_neg()
        data: NDArray[np.uint8] = octets(once).numpy()
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        data = np.ascontiguousarray(value[_once(value.strides)]).reshape(-1).view(np.uint8)
    elif isinstance(value, BUFFERS):
        return xxh3_64_intdigest(memoryview(value).tobytes())
    elif isinstance(value, list) and PLAIN.issuperset(map(type, value)):
        return value.copy()
    else:
        return [(name, part if type(part) in PLAIN else id(part)) for name, part in _inside(value)]
    return xxh3_64_intdigest(data.data)


def _once(strides: tuple[int, ...]) -> tuple[slice, ...]:
    """What to take of an array so that numbers which stand for many come once."""
    return tuple(slice(None if stride else 1) for stride in strides)


def _share_memory(one: Any, other: Any) -> bool:
    """Whether two arrays that lie among each other have bytes in common; True if that is too hard to tell."""
    first, second = _array(one), _array(other)
    if first is None or second is None:
        return True
    try:
        return np.shares_memory(first, second, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _array(value: Any) -> NDArray[Any] | None:
    if isinstance(value, np.ndarray):
        return value
    try:
        array: NDArray[Any] = value.detach().numpy()
    except (AttributeError, RuntimeError, TypeError):
        return None
    return array
