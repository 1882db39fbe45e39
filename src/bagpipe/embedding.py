"""The layers that stand in for `nn.EmbeddingBag` and `nn.Embedding`, and what they look up.

Where the rows of the current batch lie is in a view: in the cache while training, in a private buffer while evaluating.
After training layers look rows up in the store. Ids that are not rows of the batch are refused, never guessed (I8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from bagpipe.adapt import INTEGERS
from bagpipe.arrays import Floats, Int32s
from bagpipe.errors import BatchError, ModelError, ValueRangeError
from bagpipe.kernels.bag import NO_PADDING
from bagpipe.kernels.idmap import IdMap
from bagpipe.kernels.parallel import Workers
from bagpipe.layers import BoundLayer, Replacement
from bagpipe.layout import RowLayout
from bagpipe.pooling import Pooled, Pooling, flat_ids
from bagpipe.row_ops import AnyBags, RowOps
from bagpipe.row_parameter import RowParameter
from bagpipe.types import Table

Ids = npt.NDArray[np.int64]

ROWS_PER_BLOCK = 65_536
WEIGHT_BYTES_MAX = 2 * 10**9
"""A state_dict holds plain weights up to this size; larger tables are exported row by row."""


@dataclass(slots=True)
class TableView:
    """Where the rows of one table lie: row u of the batch is rows[slots[u]]."""

    rows: Tensor
    slots: Int32s
    ids: Ids
    _places: IdMap | None = None

    def find(self, ids: Ids) -> Int32s:
        """The place of each id among the rows; -1 for one that is none of them."""
        places = np.empty(len(ids), np.int64)
        if self._places is None:  # made when a model first looks up ids of its own making
            self._places = IdMap()
            self._places.find_or_insert(self.ids, np.empty(len(self.ids), np.int64))
        self._places.find(ids, places)
        return places.astype(np.int32)


class Call:
    """One look-up of a forward pass: what the row update needs of it."""

    __slots__ = ("bags", "column", "grad", "over", "weight")

    def __init__(self, bags: AnyBags, column: int, weight: float = 1.0) -> None:
        self.bags, self.column, self.weight = bags, column, weight
        self.grad: Tensor | None = None
        self.over = False

    def add(self, grad: Tensor) -> None:
        """A backward pass has reached the output; a first gradient is kept as it is, whatever its strides."""
        if self.over:
            raise ModelError(
                "a backward pass reaches look-ups of an iteration that is over, or whose rows were updated already: "
                "call loss.backward() before optimizer.step(), and before the next batch"
            )
        grad = grad.detach() if self.weight == 1.0 else grad.detach() * self.weight
        self.grad = grad if self.grad is None else self.grad + grad


class RowReader(Protocol):
    """Where rows can be read that are in no view, and set."""

    def flush(self) -> None:
        """Return when the store has every update so far."""

    def show_store(self, why: str) -> None:
        """Return when the store has every update so far; ModelError where that is not to be had for one trainer."""

    def read_rows(self, table: int, ids: Ids) -> Floats:
        """Rows as the store has them: vectors and optimizer state."""

    def touched_rows(self, table: int) -> Iterator[tuple[Ids, Floats]]:
        """The rows ever written, as trained so far, some at a time as (ids, rows)."""

    def write_rows(self, table: int, ids: Ids, values: Floats) -> None:
        """Set rows in the store."""


@dataclass(slots=True)
class Lookups:
    """What the layers of a model look up now; all of them share it."""

    layouts: Sequence[RowLayout]
    reader: RowReader
    ops: RowOps
    workers: Workers | None = None
    """Share the pooling of large batches while training goes on."""
    view: Sequence[TableView] | None = None
    """None: ids are looked up as they are, in the store."""
    recording: bool = False
    """Whether look-ups are remembered for a row update."""
    weight: float = 1.0
    """What gradients of look-ups count from now on."""
    pooling: Pooling = field(default_factory=Pooling)
    calls: list[list[Call]] = field(default_factory=list)
    """The look-ups of this iteration, a list for each table, in the order of the forward pass."""
    anchor: Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
    )
    """What makes autograd call us: look-ups have no other input with a gradient."""

    @property
    def device(self) -> torch.device:
        """Where the rows that are looked up lie."""
        return self.ops.device

    def forget(self) -> None:
        """Drop the remembered look-ups; a backward pass that still reaches one is refused."""
        for calls in self.calls:
            for call in calls:
                call.over = True
        self.calls = [[] for _ in self.layouts]
        self.pooling.drop()  # the rows are about to change, or have


class _Recorded(torch.autograd.Function):
    """A look-up whose gradient is kept for the row update, without a copy."""

    @staticmethod
    def forward(
        ctx: Any,
        _: Tensor,
        layer: CachedLayer,
        view: TableView,
        bags: AnyBags,
        shape: tuple[int, ...],
        call: Call,
        pooled: Pooled | None,
    ) -> Tensor:
        ctx.call, ctx.layer = call, layer
        ctx.set_materialize_grads(False)
        return layer.pool(view, bags, shape) if pooled is None else pooled.output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is not None and ctx.layer.wants_gradient:  # it may have been frozen since
            ctx.call.add(grad)
        return None, None, None, None, None, None, None


class _Outside(torch.autograd.Function):
    """A look-up while there is no batch in training, whose rows could not be updated."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, output: Tensor, name: str) -> Tensor:
        ctx.name = name
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> NoReturn:  # noqa: ARG004
        raise ModelError(
            f"a backward pass reaches what layer {ctx.name!r} looked up outside of the training loop, where its rows "
            "can't be updated: train inside of it, on its batches, or freeze the layer by requires_grad_(False)"
        )


class CachedLayer(Replacement):
    """Looks up rows in the place of an embedding layer; called exactly as the layer it replaces."""

    def __init__(self, bound: BoundLayer, lookups: Lookups) -> None:
        super().__init__(bound.module)
        layer = bound.module
        self.name, self.table, self.part = bound.name, bound.table, bound.part
        self.embedding_dim, self.num_embeddings = layer.embedding_dim, layer.num_embeddings
        self.padding_idx = layer.padding_idx
        self.mode = layer.mode if isinstance(layer, nn.EmbeddingBag) else None
        self.include_last_offset = isinstance(layer, nn.EmbeddingBag) and layer.include_last_offset
        self.lookups = lookups
        self.column = lookups.layouts[bound.table].columns[bound.part]
        self.placeholders = False
        """Whether a state_dict gets an empty tensor instead of the weight; `export` fills it row by row."""

    def extra_repr(self) -> str:
        """As nn.EmbeddingBag prints itself."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode}, cached"

    def __getattr__(self, name: str) -> Any:
        """What else the layer has, and what code has set on it, but for what would act on its former weight."""
        found = vars(self.replaced).get(name, self) if "_replaced" in vars(self) else self
        if found is self or callable(found) or isinstance(found, Tensor):
            return super().__getattr__(name)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "weight" in self.__dict__.get("_parameters", ()):
            raise ModelError(
                f"the weight of layer {self.name!r} can't be replaced, its rows are in bagpipe's store: set it by "
                "model.load_state_dict(), or before bagpipe.prepare"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError(
            f"layer {self.name!r} can't be copied or pickled, its rows are in bagpipe's store: keep "
            "model.state_dict(), or write the model with bagpipe.export(model, path)"
        )

    def forward(
        self,
        input: Tensor,  # noqa: A002  (the name that nn.EmbeddingBag gives it)
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pool the rows of each bag, as `nn.EmbeddingBag` does, or look them up one by one, as `nn.Embedding`."""
        # A compiled model breaks its graph here: there is nothing in look-ups that torch could compile. Not decorated
        # with torch.compiler.disable, which loads the compiler, for a second and a half, where nothing is compiled too.
        if torch.compiler.is_compiling():
            return self._leave_graph(input, offsets, per_sample_weights)
        return self._look_up(input, offsets, per_sample_weights)

    @_disable_dynamo
    def _leave_graph(self, *arguments: Any) -> Tensor:
        """A look-up of a compiled model, the first one; from now on the compiler is here and can be told for good."""
        CachedLayer.forward = torch.compiler.disable(CachedLayer.forward)  # type: ignore[method-assign, no-untyped-call]
        return self._look_up(*arguments)

    def _look_up(self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> Tensor:  # noqa: A002
        if not isinstance(input, Tensor):
            raise ModelError(
                f"layer {self.name!r} is given a {type(input).__name__}, not a tensor: of a bagpipe.Ids pass its parts "
                "as layer(ids.values, ids.offsets, ids.weights)"
            )
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise ModelError(f"layer {self.name!r}: gradients for per_sample_weights are not computed: detach them")
        if input.dtype not in INTEGERS:
            raise ModelError(f"layer {self.name!r} is given ids of type {input.dtype}: give integers, as by ids.long()")
        if not isinstance(self._parameters.get("weight"), RowParameter | None):
            raise ModelError(
                f"layer {self.name!r} is called with another weight, as by torch.func.functional_call: its rows are in "
                "bagpipe's store and are what it looks up; leave its weight out"
            )
        lookups = self.lookups
        view, places, feature = self._resolve(input)
        padding = self._padding(view)
        pooled = None
        if feature is not None and offsets is None and per_sample_weights is None:
            pooled = self._pooled(feature, input)
        if self.mode is None:
            if offsets is not None or per_sample_weights is not None:
                raise ModelError(f"layer {self.name!r} is an nn.Embedding, which takes ids only")
            bags = self._make(places.reshape(-1, 1)) if pooled is None else pooled.bags
            shape = (*input.shape, self.embedding_dim)
            counted = bags if padding == NO_PADDING else self._make(places.reshape(-1, 1), padding=padding)
        else:
            starts = self._starts(places, offsets, per_sample_weights)
            bags = counted = (
                self._make(places, starts, per_sample_weights, self.mode == "mean", padding)
                if pooled is None
                else pooled.bags
            )
            shape = (len(bags), self.embedding_dim)
        if lookups.recording and self.wants_gradient and torch.is_grad_enabled():
            call = Call(counted, self.column, lookups.weight)
            lookups.calls[self.table].append(call)
            output: Tensor = _Recorded.apply(lookups.anchor, self, view, bags, shape, call, pooled)  # type: ignore[no-untyped-call]
        else:
            output = self.pool(view, bags, shape) if pooled is None else pooled.output
            if not lookups.recording and self.wants_gradient and torch.is_grad_enabled():
                output = _Outside.apply(lookups.anchor, output, self.name)  # type: ignore[no-untyped-call]
        return output if input.device.type == "cpu" else output.to(input.device)

    @property
    def wants_gradient(self) -> bool:
        """Whether it is not frozen."""
        weight = self._parameters.get("weight")
        return self.replaced.weight.requires_grad if weight is None else weight.requires_grad

    def _apply(self, fn: Any, recurse: bool = True) -> CachedLayer:  # noqa: ARG002
        """Rows stay where they are, wherever the model's own parameters go; refused where these become others."""
        cast = fn(torch.empty(0)).dtype
        if cast != torch.float32:
            raise ModelError(
                f"layer {self.name!r} can't become {cast}, its rows are float32: cast what is not an embedding layer "
                f"by itself, as model.top.to({cast}), and what is looked up with it, or use torch.autocast"
            )
        return self

    def pool(self, view: TableView, bags: AnyBags, shape: tuple[int, ...]) -> Tensor:
        """The vectors of each bag, added up."""
        ops, workers = self.lookups.ops, self.lookups.workers
        return ops.pool(view.rows, view.slots, bags, self.column, shape, workers)

    def _pooled(self, feature: int, ids: Tensor) -> Pooled | None:
        """The output, if it was foreseen: bags of a fixed size, looked up while training on the CPU."""
        lookups = self.lookups
        if not lookups.recording or lookups.view is None or self.padding_idx is not None:
            return None
        if not lookups.ops.in_kernels or (self.mode is not None and ids.dim() != 2):
            return None
        return lookups.pooling.take(self, feature, tuple(ids.shape), lookups.view, lookups.workers)

    def _resolve(self, given: Tensor) -> tuple[TableView, Int32s, int | None]:
        """Where the rows are, for each id the place of its own, and the feature whose ids these are, if it is known."""
        lookups = self.lookups
        if lookups.view is not None:
            view = lookups.view[self.table]
            known = lookups.pooling.recognise(given, self.table, view)
            if known is not None:
                return view, *known
            # Copied or computed from the ids of the batch: that is exact as long as the rows are here.
            ids = flat_ids(given.cpu())
            places = view.find(ids)
            if not (places < 0).any():
                return view, places.reshape(given.shape), None
            if torch.is_grad_enabled() and lookups.recording:
                self._refuse_missing(int(ids[places < 0][0]))
            lookups.reader.show_store(f"layer {self.name!r} is given ids of another batch")  # to evaluate
        values = flat_ids(given.cpu())
        check_range(lookups.layouts[self.table].table, [values])
        unique, inverse = np.unique(values, return_inverse=True)
        rows = torch.from_numpy(lookups.reader.read_rows(self.table, unique)).to(lookups.device)
        view = TableView(rows, np.arange(len(unique), dtype=np.int32), unique)
        return view, inverse.astype(np.int32).reshape(given.shape), None

    def _make(
        self,
        places: Int32s,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        mean: bool = False,
        padding: int = NO_PADDING,
    ) -> AnyBags:
        return self.lookups.ops.make_bags(places, offsets, weights, mean, padding)

    def _starts(self, places: Int32s, offsets: Tensor | None, weights: Tensor | None) -> Tensor | None:
        """Where each bag begins, once everything has a shape that `nn.EmbeddingBag` takes."""
        if places.ndim != (2 if offsets is None else 1):
            raise BatchError(
                f"layer {self.name!r} is given ids of {places.ndim} dimensions, offsets {offsets is not None}: "
                "give (bags, ids a bag) without offsets, or one dimension with them"
            )
        if weights is not None and (tuple(weights.shape) != places.shape or weights.dtype != torch.float32):
            raise BatchError(
                f"layer {self.name!r} is given per_sample_weights {weights.dtype} of shape {tuple(weights.shape)} for "
                f"ids of shape {places.shape}: give one float32 an id"
            )
        if offsets is None or not self.include_last_offset:
            return offsets
        if len(offsets) == 0 or int(offsets[-1]) != len(places):
            raise BatchError(
                f"layer {self.name!r} has include_last_offset=True and is given {len(places)} ids with offsets that "
                f"end at {int(offsets[-1]) if len(offsets) else 'nothing'}: the last offset is the number of ids"
            )
        return offsets[:-1]

    def _padding(self, view: TableView) -> int:
        if self.padding_idx is None:
            return NO_PADDING
        at = np.flatnonzero(view.ids == self.padding_idx)
        return int(at[0]) if len(at) else NO_PADDING

    def _refuse_missing(self, missing: int) -> NoReturn:
        """Raise for an id whose row is not here: it is of another feature, or of no feature of this batch."""
        lookups = self.lookups
        assert lookups.view is not None
        there = [number for number, view in enumerate(lookups.view) if (view.ids == missing).any()]
        others = [name for number in there for name in lookups.layouts[number].table.features]
        mapping = f", while {', '.join(map(repr, others))} has it (is the mapping right? features={{...}})"
        raise ModelError(
            f"layer {self.name!r} is given id {missing}, which {self._features()} does not have in this batch"
            f"{mapping if others else ''}: in training a layer looks up ids of the current batch, not those of an "
            "earlier one, and none that the model makes up; to evaluate, do it under torch.no_grad(). Ids that are "
            "made of others, as by adding an offset, must be in the batch too, as a feature of its own that "
            f"features={{'rows': {self.name!r}}} maps; a small layer, such as of positions, may stay as it is with "
            f"options=bagpipe.Options(keep=[{self.name!r}])"
        )

    def _features(self) -> str:
        return ", ".join(map(repr, self.lookups.layouts[self.table].table.features))

    def blocks(self) -> Iterator[Tensor]:
        """The plain weight as trained so far, some rows at a time."""
        reader, columns = self.lookups.reader, slice(self.column, self.column + self.embedding_dim)
        reader.flush()
        for start in range(0, self.num_embeddings, ROWS_PER_BLOCK):
            ids = np.arange(start, min(start + ROWS_PER_BLOCK, self.num_embeddings), dtype=np.int64)
            yield torch.from_numpy(reader.read_rows(self.table, ids)[:, columns])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: ARG002
        shape = (self.num_embeddings, self.embedding_dim)
        if self.placeholders:
            destination[prefix + "weight"] = torch.empty(shape, device="meta")
            return
        num_bytes = self.num_embeddings * self.embedding_dim * 4
        if num_bytes > WEIGHT_BYTES_MAX:
            raise ModelError(
                f"layer {self.name!r} has {num_bytes / 1e9:.1f} GB of weights, too many for a state_dict "
                f"(at most {WEIGHT_BYTES_MAX / 1e9:.0f} GB): write them with bagpipe.export(model, path)"
            )
        destination[prefix + "weight"] = torch.cat(list(self.blocks()))

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,  # noqa: ARG002
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],  # noqa: ARG002
        error_msgs: list[str],
    ) -> None:
        key, shape = prefix + "weight", (self.num_embeddings, self.embedding_dim)
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
        elif tuple(state_dict[key].shape) != shape:
            error_msgs.append(f"{key} has shape {tuple(state_dict[key].shape)}, the layer {shape}")
        else:
            self._set(state_dict[key].detach().to("cpu", torch.float32))

    def _set(self, weight: Tensor) -> None:
        reader = self.lookups.reader
        for start in range(0, self.num_embeddings, ROWS_PER_BLOCK):
            block = weight[start : start + ROWS_PER_BLOCK].numpy()
            ids = np.arange(start, start + len(block), dtype=np.int64)
            rows = reader.read_rows(self.table, ids)
            rows[:, self.column : self.column + self.embedding_dim] = block
            reader.write_rows(self.table, ids, rows)


def check_range(table: Table, parts: Sequence[Ids]) -> None:
    """Refuse ids outside of a table; `parts` are of its features, or one of any of them."""
    if table.rows is None:
        return
    for position, part in enumerate(parts):
        bad = part[(part < 0) | (part >= table.rows)]
        if len(bad):
            named = table.features[position] if len(parts) == len(table.features) else ", ".join(table.features)
            raise ValueRangeError(
                f"feature {named!r} has id {bad[0]}, out of range for table {table.name!r} ({table.rows} rows): "
                "check the data, or give the table more rows"
            )
