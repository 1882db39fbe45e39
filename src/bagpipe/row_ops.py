"""What is done with rows where they lie: `HostRows` by compiled kernels, `DeviceRows` by torch operations.

Cache, look-ups, updates and exchanges reach rows through this interface alone. On the host the result is that of the
NumPy definition, bit for bit (I1). On an accelerator additions are made segment by segment over stably sorted
occurrences, in a fixed order, but not in that of the definition: results are equal to float tolerance. No GPU has run
`DeviceRows`: the tests run it on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bagpipe.arrays import Floats, Int32s
from bagpipe.errors import CapacityError
from bagpipe.kernels import bag, move
from bagpipe.kernels.bag import NO_PADDING, Bags
from bagpipe.kernels.lanes import adjacent
from bagpipe.kernels.parallel import Workers
from bagpipe.kernels.update import first_not_finite
from bagpipe.layout import RowLayout
from bagpipe.optim import Scalars

ALIGNMENT = 64
SPLIT_BAGS = 2048
"""Fewer bags than this are pooled by one thread: handing over costs more than it saves."""
FINITE = -1

_force = False
"""Tests set it to run the operations of accelerators on the CPU."""


class AnyBags(Protocol):
    """What one call of an embedding layer looks up, in a form that its operations know."""

    def __len__(self) -> int: ...


class RowOps(Protocol):
    """The operations on rows of one device."""

    device: torch.device
    in_kernels: bool
    """Whether compiled kernels reach the rows: then threads of ours share the work, and look-ups are foreseen."""

    def zeros(self, slots: int, width: int) -> Tensor:
        """Memory for a cache."""
        ...

    def make_bags(
        self, places: Int32s, offsets: Tensor | None, weights: Tensor | None, mean: bool, padding: int
    ) -> AnyBags:
        """From the places of rows, shaped as their ids are, and the other arguments of an embedding layer."""
        ...

    def pool(
        self, rows: Tensor, slots: Int32s, bags: Any, column: int, shape: tuple[int, ...], workers: Workers | None
    ) -> Tensor:
        """The pooled vectors in a tensor of this shape, which ends with their dimension. No view of another one, which
        autograd would let nobody change in place."""
        ...

    def reached(self, bags: Any) -> Int32s:
        """The places of the rows that a gradient of these bags reaches."""
        ...

    def clear(self, buffer: Tensor) -> None:
        """Set it to zero."""
        ...

    def accumulate(self, grad: Tensor, bags: Any, buffer: Tensor, column: int) -> None:
        """Add the gradients of all bags to the columns of their rows in `buffer`, one row for each of the plan."""
        ...

    def first_not_finite(self, values: Tensor) -> int:
        """The first row with a number that is not finite; `FINITE`: there is none."""
        ...

    def apply(self, layout: RowLayout, rows: Tensor, slots: Int32s, grads: Tensor, scalars: Scalars) -> None:
        """Update rows in their slots."""
        ...

    def read(self, rows: Tensor, slots: Int32s) -> Floats:
        """What is in these slots, in memory of the host."""
        ...

    def write(self, rows: Tensor, slots: Int32s, values: Floats) -> None:
        """Put values of the host into the first columns of these slots; done when it returns."""
        ...

    def gather(self, rows: Tensor, slots: Int32s, out: Tensor) -> None:
        """The first columns of these slots, on the device."""
        ...

    def scatter(self, rows: Tensor, slots: Int32s, values: Tensor) -> None:
        """The way back."""
        ...

    def multiply_at(self, values: Tensor, places: Int32s, factor: float, out: Tensor) -> None:
        """Rows of values times a float32."""
        ...

    def add_at(self, into: Tensor, places: Int32s, values: Tensor) -> None:
        """Add to rows, none of which is named twice."""
        ...

    def divide(self, values: Tensor, divisor: float) -> None:
        """By a float32, in place."""
        ...

    def fence(self) -> None:
        """The training thread has queued all of its work on the rows so far; `read` and `write` will wait for it."""
        ...


def ops_on(device: torch.device) -> RowOps:
    """The operations on rows of a device."""
    return HostRows() if device.type == "cpu" and not _force else DeviceRows(device)


class HostRows:
    """Kernels over the memory of the host."""

    device = torch.device("cpu")
    in_kernels = True

    def zeros(self, slots: int, width: int) -> Tensor:
        """A page takes memory from when it is first written: policy `ideal` has slots for every row."""
        count = slots * width
        try:
            memory = np.zeros(count + ALIGNMENT // 4, np.float32)  # PyTorch's own write every page at once
        except MemoryError as error:
            raise CapacityError(
                f"a cache of {slots:,} rows of {width} floats takes {4 * count:,} bytes, more than there are: give a "
                "smaller `cache`, or instead of policy 'ideal', which has a place for every row, another"
            ) from error
        first = -memory.ctypes.data % ALIGNMENT // 4
        return torch.from_numpy(memory[first : first + count].reshape(slots, width))

    def make_bags(
        self, places: Int32s, offsets: Tensor | None, weights: Tensor | None, mean: bool, padding: int
    ) -> Bags:
        """Arrays, without a copy where that can be."""
        starts = None if offsets is None else offsets.detach().to("cpu", torch.int64).contiguous().numpy()
        factors = None if weights is None else weights.detach().cpu().contiguous().numpy()
        return Bags(places, starts, factors, mean, padding)

    def pool(
        self, rows: Tensor, slots: Int32s, bags: Bags, column: int, shape: tuple[int, ...], workers: Workers | None
    ) -> Tensor:
        """In parts, one a thread."""
        output = torch.empty(shape, dtype=torch.float32, device="cpu")
        pooling = partial(pool_part, rows.numpy(), slots, bags, column, output.view(len(bags), shape[-1]).numpy())
        tasks = [partial(pooling, *part) for part in split(len(bags), workers)]
        if workers is None or len(tasks) == 1:
            for task in tasks:
                task()
        else:
            workers.run(tasks)
        return output

    def reached(self, bags: Bags) -> Int32s:
        """All but the padding."""
        places = bags.places.reshape(-1)
        return places if bags.padding == NO_PADDING else places[places != bags.padding]

    def clear(self, buffer: Tensor) -> None:
        """Not by torch, which would bring threads of its own."""
        buffer.numpy().fill(0)

    def accumulate(self, grad: Tensor, bags: Bags, buffer: Tensor, column: int) -> None:
        """In the order of occurrences."""
        vectors = grad.numpy()
        vectors = vectors if adjacent(vectors) else np.ascontiguousarray(vectors)
        bad = bag.accumulate(vectors, bags, buffer.numpy(), column)
        assert bad < 0, "the forward pass has checked every place"

    def first_not_finite(self, values: Tensor) -> int:
        """One pass."""
        return first_not_finite(values.numpy())

    def apply(self, layout: RowLayout, rows: Tensor, slots: Int32s, grads: Tensor, scalars: Scalars) -> None:
        """Where the rows are."""
        layout.optimizer.apply_in_cache(rows.numpy(), slots, grads.numpy(), layout.dims, scalars)

    def read(self, rows: Tensor, slots: Int32s) -> Floats:
        """A copy."""
        values = np.empty((len(slots), rows.shape[1]), np.float32)
        move.gather(rows.numpy(), slots, values)
        return values

    def write(self, rows: Tensor, slots: Int32s, values: Floats) -> None:
        """A copy."""
        move.scatter(rows.numpy(), slots, values)

    def gather(self, rows: Tensor, slots: Int32s, out: Tensor) -> None:
        """A copy."""
        move.gather(rows.numpy(), slots, out.numpy())

    def scatter(self, rows: Tensor, slots: Int32s, values: Tensor) -> None:
        """A copy."""
        move.scatter(rows.numpy(), slots, values.numpy())

    def multiply_at(self, values: Tensor, places: Int32s, factor: float, out: Tensor) -> None:
        """As the definition says."""
        np.multiply(values.numpy()[places], np.float32(factor), out=out.numpy())

    def add_at(self, into: Tensor, places: Int32s, values: Tensor) -> None:
        """As the definition says."""
        into.numpy()[places] += values.numpy()

    def divide(self, values: Tensor, divisor: float) -> None:
        """As the definition says."""
        numbers = values.numpy()
        np.divide(numbers, np.float32(divisor), out=numbers)

    def fence(self) -> None:
        """Work on the host is done when it returns."""


def pool_part(rows: Floats, slots: Int32s, bags: Bags, column: int, out: Floats, start: int, stop: int) -> None:
    """Pool some bags whose places are those of rows."""
    bad = bag.pool(rows, slots, bags, column, out, start, stop)
    assert bad < 0, f"occurrence {bad} has place {bags.places.reshape(-1)[bad]} of {len(slots)} rows"


def split(num_bags: int, workers: Workers | None) -> Sequence[tuple[int, int]]:
    """The parts of a look-up, one a thread."""
    parts = workers.num_threads if workers is not None and num_bags >= SPLIT_BAGS else 1
    return [(num_bags * part // parts, num_bags * (part + 1) // parts) for part in range(parts)]


@dataclass(frozen=True, slots=True)
class DeviceBags:
    """What one call of an embedding layer looks up, on the device."""

    places: Tensor
    """For each occurrence the index of its row in the plan."""
    bag: Tensor
    """For each occurrence its bag."""
    counts: Tensor
    """Occurrences of each bag."""
    weights: Tensor | None
    mean: bool

    def __len__(self) -> int:
        return len(self.counts)


class DeviceRows:
    """Torch operations; what comes from the host and goes there has a stream of its own where there is CUDA."""

    in_kernels = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._queued: Any = None

    def zeros(self, slots: int, width: int) -> Tensor:
        """All of it at once."""
        return torch.zeros(slots, width, dtype=torch.float32, device=self.device)

    def make_bags(
        self, places: Int32s, offsets: Tensor | None, weights: Tensor | None, mean: bool, padding: int
    ) -> DeviceBags:
        """Without occurrences of the padding."""
        flat = torch.from_numpy(places).to(self.device).reshape(-1).to(torch.int64)
        if offsets is None:
            counts = torch.full((places.shape[0],), places.shape[1], dtype=torch.int64, device=self.device)
        else:
            starts = offsets.to(self.device, torch.int64)
            counts = torch.diff(starts, append=starts.new_tensor([len(flat)]))
        of_bag = torch.repeat_interleave(counts)
        factors = None if weights is None else weights.detach().to(self.device).reshape(-1)
        if padding != NO_PADDING:
            kept = flat != padding
            flat, of_bag = flat[kept], of_bag[kept]
            factors = None if factors is None else factors[kept]
            counts = torch.bincount(of_bag, minlength=len(counts))
        return DeviceBags(flat, of_bag, counts, factors, mean)

    def pool(
        self,
        rows: Tensor,
        slots: Int32s,
        bags: DeviceBags,
        column: int,
        shape: tuple[int, ...],
        workers: Workers | None,  # noqa: ARG002
    ) -> Tensor:
        """Segment by segment."""
        vectors = rows[:, column : column + shape[-1]].index_select(0, self._index(slots)[bags.places])
        if bags.weights is not None:
            vectors = vectors * bags.weights[:, None]
        sums = _add_up(vectors, bags.counts)
        sums = sums / bags.counts.clamp(min=1)[:, None] if bags.mean else sums
        return sums if tuple(sums.shape) == shape else sums.view(shape).clone()

    def reached(self, bags: DeviceBags) -> Int32s:
        """All that are left."""
        places: Int32s = bags.places.to(torch.int32).cpu().numpy()
        return places

    def clear(self, buffer: Tensor) -> None:
        """In order with all other work."""
        buffer.zero_()

    def accumulate(self, grad: Tensor, bags: DeviceBags, buffer: Tensor, column: int) -> None:
        """Over occurrences that are sorted stably by their rows."""
        if bags.mean:
            grad = grad / bags.counts.clamp(min=1)[:, None]
        vectors = grad.index_select(0, bags.bag)
        if bags.weights is not None:
            vectors = vectors * bags.weights[:, None]
        order = torch.argsort(bags.places, stable=True)
        counts = torch.bincount(bags.places, minlength=len(buffer))
        buffer[:, column : column + grad.shape[1]] += _add_up(vectors[order], counts)

    def first_not_finite(self, values: Tensor) -> int:
        """Waits for the device."""
        bad = torch.nonzero(~torch.isfinite(values).all(1)).reshape(-1)
        return int(bad[0]) if len(bad) else FINITE

    def apply(self, layout: RowLayout, rows: Tensor, slots: Int32s, grads: Tensor, scalars: Scalars) -> None:
        """The rows of the batch pass through the CPU, where the definition is."""
        index = self._index(slots)
        values = rows.index_select(0, index).cpu().numpy()
        layout.optimizer.apply(values, grads.cpu().numpy(), layout.dims, scalars)
        rows.index_copy_(0, index, torch.from_numpy(values).to(rows.device))

    def read(self, rows: Tensor, slots: Int32s) -> Floats:
        """Through pinned memory."""
        pinned = self._stream is not None
        values = torch.empty(len(slots), rows.shape[1], dtype=torch.float32, device="cpu", pin_memory=pinned)
        with self._streaming():
            values.copy_(rows.index_select(0, self._index(slots)), non_blocking=True)
        self._finish()
        found: Floats = values.numpy()
        return found

    def write(self, rows: Tensor, slots: Int32s, values: Floats) -> None:
        """Through pinned memory; a prefetched batch needs no event, as this has waited."""
        staged = torch.from_numpy(values)
        if self._stream is not None:
            staged = staged.pin_memory()
        with self._streaming():
            columns = rows[:, : staged.shape[1]]
            columns.index_copy_(0, self._index(slots), staged.to(self.device, non_blocking=True))
        self._finish()

    def gather(self, rows: Tensor, slots: Int32s, out: Tensor) -> None:
        """In order with all other work."""
        out.copy_(rows[:, : out.shape[1]].index_select(0, self._index(slots)))

    def scatter(self, rows: Tensor, slots: Int32s, values: Tensor) -> None:
        """In order with all other work."""
        rows[:, : values.shape[1]].index_copy_(0, self._index(slots), values)

    def multiply_at(self, values: Tensor, places: Int32s, factor: float, out: Tensor) -> None:
        """In order with all other work."""
        out.copy_(values.index_select(0, self._index(places)) * float(factor))

    def add_at(self, into: Tensor, places: Int32s, values: Tensor) -> None:
        """In order with all other work."""
        into.index_add_(0, self._index(places), values)

    def divide(self, values: Tensor, divisor: float) -> None:
        """In order with all other work."""
        values.div_(float(divisor))

    def fence(self) -> None:
        """Remember how far the training thread is."""
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self._queued = event

    def _streaming(self) -> Any:
        if self._stream is None:
            return nullcontext()
        if self._queued is not None:
            self._stream.wait_event(self._queued)
        return torch.cuda.stream(self._stream)

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _index(self, places: Int32s) -> Tensor:
        return torch.from_numpy(places.astype(np.int64)).to(self.device)


def _add_up(vectors: Tensor, counts: Tensor) -> Tensor:
    """The sum of the first counts[0] vectors, of the next counts[1], and so on."""
    if not vectors.numel():
        return vectors.new_zeros(len(counts), vectors.shape[1])
    return torch.segment_reduce(vectors, "sum", lengths=counts, axis=0, unsafe=True, initial=0.0)
