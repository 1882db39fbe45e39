"""Divides a loader's batch among trainers, whatever its shape: everything that belongs to a sample goes with it.

How many samples a batch has is said by the ids that the model looks up. Then, wherever it lies in the batch:
- `Ids`, (values, offsets[, weights]) and KeyedJaggedTensors are divided by their bags;
- a tensor or NumPy array by its first dimension, which must be the number of samples; one without dimensions, or whose
  first one is 1 so that it applies to all samples alike, is given to all trainers; any other is refused;
- a list or tuple with one element a sample by element, unless all tensors in it are divided themselves;
- everything else is given to all.
What is done with a place of the batch is decided when it is first seen, so that all batches are divided alike: one that
contradicts it is refused. Parts own their tensors; a trainer without samples gets tensors without lines.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bagpipe.adapt import Adapter, Path, child_of, described, is_keyed, is_pair, parts_of, set_attributes, with_parts
from bagpipe.errors import BatchError
from bagpipe.oracle.assign import Assigner, Assignment
from bagpipe.types import Ids

Role = Literal["samples", "all", "elements", "parts", "offsets", "lengths"]
"""What a place of the batch has: a line a sample, something for all, an element a sample, parts, or bags."""

REMEDY = (
    "give samples in the first dimension and bags as (values, offsets) or bagpipe.Ids, and keep what all samples share "
    "out of the batches"
)


@dataclass(frozen=True, slots=True)
class _Share:
    """Which samples of a batch one trainer gets."""

    samples: slice | Tensor
    total: int
    """Samples of the whole batch."""
    number: int
    """Of the batch, for messages."""
    made: dict[int, Any] = field(default_factory=dict)
    """Parts of objects by identity: what refers to an object that holds it will refer to its part."""


class Splitter:
    """Knows how the batches of a loader are divided."""

    def __init__(self, adapter: Adapter, features: Sequence[str], ending: Collection[str] = ()) -> None:
        """`features` are those that the model looks up; offsets of those in `ending` end with the number of ids."""
        self._adapter, self._features = adapter, list(features)
        self._used = {adapter.paths[name] for name in features}
        self._ending = {adapter.paths[name] for name in ending}
        self._roles: dict[Path, Role] = {}

    def divide(self, batch: Any, number: int, assigner: Assigner) -> list[tuple[Any, int]]:
        """Each trainer's part of batch `number`, and how many samples it has."""
        edges = [self._edges(batch, name, number) for name in self._features]
        counts = [each if isinstance(each, int) else len(each) - 1 for each in edges]
        if len(set(counts)) > 1:
            found = ", ".join(f"{name!r} has {count}" for name, count in zip(self._features, counts, strict=True))
            raise BatchError(f"batch {number}: ids differ in their number of samples: {found}: {REMEDY}")
        if assigner.name != "aware":
            return self.split(batch, assigner.assign(number, counts[0]), number)
        ids = list(self._adapter.extract(batch, self._features, number).values())
        offsets = [None if isinstance(each, int) else each[:-1].numpy() for each in edges]
        return self.split(batch, assigner.assign(number, counts[0], ids, offsets), number)

    def split(self, batch: Any, assignment: Assignment, number: int = 0) -> list[tuple[Any, int]]:
        """The same for an assignment that is known."""
        order = None if assignment.order is None else torch.from_numpy(assignment.order)
        parts = []
        for start, stop in pairwise(assignment.bounds):
            samples = slice(start, stop) if order is None else order[start:stop]
            parts.append((self._take(batch, (), _Share(samples, assignment.bounds[-1], number)), stop - start))
        return parts

    def _edges(self, batch: Any, name: str, number: int) -> int | Tensor:
        """How many samples the ids of a feature are of, or where the bag of each begins and the last one ends."""
        path, leaf = self._adapter.paths[name], batch
        self._adapter.extract(batch, [name], number)  # which says what is wrong if they are not there
        for step in path:
            if is_keyed(leaf):
                return _edges_of(_lengths_by_key(leaf, number)[list(leaf.keys()).index(step)])
            leaf = child_of(leaf, step)
        if isinstance(leaf, Ids):
            return len(leaf) if leaf.offsets is None else _edges_before(leaf.offsets, len(leaf.values))
        if isinstance(leaf, list | tuple):
            return self._edges_of_pair(leaf, path, number)
        if leaf.dim() == 0:
            raise BatchError(f"batch {number}: the ids of feature {name!r} are one number: {REMEDY}")
        return int(leaf.shape[0])

    def _take(self, value: Any, path: Path, share: _Share) -> Any:
        if isinstance(value, Tensor | np.ndarray):
            return _lines(value, share) if self._by_sample(value, path, share) else value
        if isinstance(value, Ids):
            return self._take_ids(value, path, share)
        if is_keyed(value):
            return self._take_keyed(value, path, share)
        if path and is_pair(value) and self._is_bags(value, path, share):
            return self._take_pair(value, path, share)
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return self._take_list(value, path, share)
        return self._take_parts(value, path, share)

    def _take_parts(self, value: Any, path: Path, share: _Share) -> Any:
        if id(value) in share.made:
            return share.made[id(value)]
        parts = dict(parts_of(value))
        if not parts:
            return value
        if isinstance(value, Mapping | tuple | list):
            return with_parts(value, self._take_all(parts, path, share))
        part = share.made[id(value)] = copy.copy(value)
        set_attributes(part, self._take_all(parts, path, share))
        return part

    def _take_all(self, parts: Mapping[str, Any], path: Path, share: _Share) -> dict[str, Any]:
        return {name: self._take(part, (*path, name), share) for name, part in parts.items()}

    def _take_list(self, value: list[Any] | tuple[Any, ...], path: Path, share: _Share) -> Any:
        role = self._roles.setdefault(path, "elements" if self._is_by_element(value, path, share) else "parts")
        if role == "parts":
            return self._take_parts(value, path, share)
        if len(value) != share.total:
            raise self._contradiction(f"a {type(value).__name__} of {len(value)} elements", path, share)
        if isinstance(share.samples, slice):
            return value[share.samples]
        return type(value)(value[sample] for sample in share.samples.tolist())

    def _is_by_element(self, value: list[Any] | tuple[Any, ...], path: Path, share: _Share) -> bool:
        if len(value) != share.total or any(used[: len(path)] == path for used in self._used):
            return False
        first = [each.shape[:1] for each in _tensors(value)]
        return not first or any(shape != (share.total,) for shape in first)

    def _take_ids(self, ids: Ids, path: Path, share: _Share) -> Ids:
        if len(ids) != share.total:
            raise self._contradiction(f"bagpipe.Ids of {len(ids)} samples", path, share)
        if ids.offsets is None:
            weights = None if ids.weights is None else _lines(ids.weights, share)
            return Ids(_lines(ids.values, share), None, weights)
        edges = _edges_before(ids.offsets, len(ids.values))
        values, lengths, weights = _bags(ids.values, edges, ids.weights, share.samples)
        return Ids(values, _offsets_of(lengths, ids.offsets), weights)

    def _take_pair(self, pair: Sequence[Tensor], path: Path, share: _Share) -> Any:
        edges = self._edges_of_pair(pair, path, share.number)
        if len(edges) != share.total + 1:
            raise self._contradiction(f"a pair of {len(edges) - 1} bags", path, share)
        weights = pair[2] if len(pair) == 3 else None
        values, lengths, weights = _bags(pair[0], edges, weights, share.samples)
        second = lengths.to(pair[1].dtype)
        if self._roles[path] == "offsets":
            second = _offsets_of(lengths, pair[1], path in self._ending)
        parts = [values, second] if weights is None else [values, second, weights]
        return type(pair)(parts)  # type: ignore[call-arg]

    def _take_keyed(self, keyed: Any, path: Path, share: _Share) -> Any:
        lengths = _lengths_by_key(keyed, share.number)
        if lengths.shape[1] != share.total:
            raise self._contradiction(f"a {type(keyed).__name__} of {lengths.shape[1]} samples", path, share)
        weights = getattr(keyed, "weights_or_none", lambda: None)()
        edges, first = _edges_of(lengths.reshape(-1)), torch.arange(len(lengths))[:, None] * share.total
        samples = torch.arange(share.total)[share.samples] if isinstance(share.samples, slice) else share.samples
        values, chosen, weights = _bags(keyed.values(), edges, weights, (first + samples).reshape(-1))
        return type(keyed)(
            keys=list(keyed.keys()), values=values, weights=weights, lengths=chosen.to(keyed.lengths().dtype)
        )

    def _is_bags(self, pair: Sequence[Tensor], path: Path, share: _Share) -> bool:
        """Whether two tensors side by side are bags: if the model looks them up as such, or if they can only be that.

        Two of as many numbers as there are samples, labels for example, are what they seem.
        """
        if path in self._roles:
            return self._roles[path] != "parts"
        within = {used[:-1] for used in self._used}
        return path in self._used or (path not in within and any(len(each) != share.total for each in pair))

    def _edges_of_pair(self, pair: Sequence[Tensor], path: Path, number: int) -> Tensor:
        """Where the bags of a pair begin and end; its second tensor has offsets, or else lengths, in all batches."""
        values, second = pair[:2]
        offsets = second[:-1] if path in self._ending else second
        edges = _edges_before(offsets, len(values))
        ends = path not in self._ending or second[-1:].tolist() == [len(values)]
        good: dict[Role, bool] = {
            "offsets": int(edges[0]) == 0 and bool((edges.diff() >= 0).all()) and ends,
            "lengths": bool((second >= 0).all()) and int(second.sum()) == len(values),
        }
        guess: Role = "lengths" if good["lengths"] and not good["offsets"] else "offsets"
        role = self._roles.get(path, guess)
        if not good[role]:
            raise BatchError(
                f"batch {number}: {'.'.join(path)!r} is a pair of tensors, but the second has neither offsets nor "
                f"lengths of bags of {len(values)} values{'' if path not in self._roles else f' ({role} so far)'}: "
                "give (values, offsets), from 0 on and never falling"
            )
        self._roles[path] = role
        return edges if role == "offsets" else _edges_of(second)

    def _by_sample(self, value: Any, path: Path, share: _Share) -> bool:
        if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_nested or not value.is_cpu):
            kind = "on another device than the CPU" if value.layout == torch.strided else "sparse or nested"
            raise BatchError(
                f"batch {share.number}: {'.'.join(path) or 'it'!r} is {described(value)}, {kind}: with several "
                "trainers give plain tensors on the CPU, and change them in the training loop"
            )
        role = self._roles.get(path)
        if role is None:
            role = self._roles[path] = self._role(value, path, share)
        if role == "samples" and tuple(value.shape[:1]) != (share.total,):
            raise self._contradiction(described(value), path, share)
        return role == "samples"

    def _role(self, value: Any, path: Path, share: _Share) -> Role:
        if tuple(value.shape[:1]) == (share.total,):
            return "samples"
        if value.ndim and value.shape[0] != 1:
            raise self._contradiction(described(value), path, share)
        return "all"

    def _contradiction(self, what: str, path: Path, share: _Share) -> BatchError:
        return BatchError(
            f"batch {share.number} has {share.total} samples, and {'.'.join(path) or 'it'!r} is {what}: which trainer "
            f"gets what of it? {REMEDY[0].upper()}{REMEDY[1:]}"
        )


def _lines(value: Any, share: _Share) -> Any:
    """A copy of the lines of these samples, in memory of its own: alignment can change bits of matrix products."""
    samples = share.samples
    if isinstance(value, np.ndarray):
        return np.array(value[samples if isinstance(samples, slice) else samples.numpy()], order="C")
    value = value.detach()
    if isinstance(samples, slice):
        return value[samples].clone(memory_format=torch.contiguous_format)
    return value.index_select(0, samples).contiguous()


def _bags(
    values: Tensor, edges: Tensor, weights: Tensor | None, samples: slice | Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The values, lengths and weights of the bags of these samples."""
    lengths = edges.diff()
    if isinstance(samples, slice):
        places = slice(int(edges[samples.start]), int(edges[samples.stop]))
        taken = None if weights is None else weights.detach()[places].clone()
        return values[places].clone(), lengths[samples].clone(), taken
    chosen = lengths.index_select(0, samples)
    shifts = edges[:-1].index_select(0, samples) - (chosen.cumsum(0) - chosen)
    at = torch.repeat_interleave(shifts, chosen)
    at += torch.arange(len(at))
    return values.index_select(0, at), chosen, None if weights is None else weights.detach().index_select(0, at)


def _edges_before(offsets: Tensor, end: int) -> Tensor:
    return torch.cat([offsets.to(torch.int64), torch.tensor([end])])


def _edges_of(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.to(torch.int64).cumsum(0)])


def _offsets_of(lengths: Tensor, like: Tensor, ending: bool = False) -> Tensor:
    edges = _edges_of(lengths)
    return (edges if ending else edges[:-1].clone()).to(like.dtype)


def _lengths_by_key(keyed: Any, number: int) -> Tensor:
    """Key by key the number of ids of each sample."""
    lengths, keys = keyed.lengths(), list(keyed.keys())
    if not keys or len(lengths) % len(keys):
        raise BatchError(
            f"batch {number}: a {type(keyed).__name__} of {len(keys)} keys has {len(lengths)} lengths: with several "
            "trainers each key has one a sample"
        )
    by_key: Tensor = lengths.reshape(len(keys), -1)
    return by_key


def _tensors(value: Any) -> Iterator[Any]:
    """All tensors and arrays in a value; objects are not looked into."""
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for _, part in parts_of(value):
            yield from _tensors(part)
