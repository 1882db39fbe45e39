"""Finds the ids in whatever a loader yields, takes them out, and puts them back.

Batches may be dicts, tuples, named tuples, dataclasses or plain objects, nested; ids may be integer tensors, `Ids`,
(values, offsets[, weights]) tuples, or a KeyedJaggedTensor, known by its methods. Everything else passes through
untouched. A feature's name is its key; where two places use the same key, the whole path, joined with dots. What a
batch's parts are is decided once, from names and types and never from values, so that all batches are read alike.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bagpipe.errors import BatchError
from bagpipe.types import Ids

Path = tuple[str, ...]
Tree = dict[str, Any]
"""What is to be replaced within a value: for each part a tree, or the name of the feature that it is."""
NewIds = Callable[[str, Tensor], Tensor]
"""What comes, one after another, in the place of a feature's ids, by its name and what is there."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


ACCEPTED = "integer tensors, bagpipe.Ids, (values, offsets) pairs or KeyedJaggedTensors, in dicts, tuples or objects"


class Adapter:
    """Knows where a loader's batches hold their ids; learnt from the first one."""

    def __init__(self, example: object) -> None:
        self.kind = type(example).__name__
        self.others: dict[str, str] = {}
        """What else there is in a batch, by name: of which type and shape."""
        self._leaves = list(_leaves(example, (), (), self.others))
        self.paths: dict[str, Path] = {}
        self._guessed: set[str] = set()
        self.choose()

    def choose(self, names: Collection[str] = (), *, bags: bool = True) -> None:
        """Decide what two tensors side by side are, (values, offsets) of bags or two features, and name all features.

        `names` are those that the caller has for features, and decide where they can: 'words' is a pair of bags,
        'words.0' is the first of two features. Elsewhere a pair is bags if `bags`: if a layer of the model takes them.
        """
        names, pairs = set(names), [path for path, pair in self._leaves if pair]
        two = {path for path in pairs if names & {".".join((*path, position)) for position in ("0", "1")}}
        if len(pairs) == 1 and not names <= set(self._named(two, names)) and names <= set(self._named(pairs, names)):
            two = set(pairs)
        unnamed = {path for path in pairs if path not in two and not names & _names_of(path)}
        if not bags:
            two |= unnamed
        self.paths = self._named(two, names)
        self._guessed = {name for name, path in self.paths.items() if path in unnamed}

    def _named(self, two: Collection[Path], names: set[str]) -> dict[str, Path]:
        """All features by name, if these pairs are two features each."""
        places: list[Path] = []
        for path, _ in self._leaves:
            places += [(*path, "0"), (*path, "1")] if path in two else [path]
        last = Counter(path[-1] if path else "" for path in places)
        named = {}
        for path in places:
            short, full = path[-1] if path else "", ".".join(path)
            named[full if full in names or last[short] > 1 else short] = path
        return named

    def require(self, names: Sequence[str]) -> None:
        """BatchError if a feature was not there in the first batch."""
        self.choose(names)
        for name in names:
            if name not in self.paths and name in self.others:
                raise BatchError(f"feature {name!r} is {self.others[name]}: ids are {ACCEPTED}")
            if name not in self.paths:
                found = ", ".join(map(repr, self.paths)) or "none"
                raise BatchError(f"the batches have no ids of feature {name!r}; they have {found}")

    def require_any(self) -> None:
        """BatchError if there are no ids at all."""
        if not self.paths:
            found = ", ".join(f"{name!r} is {what}" for name, what in list(self.others.items())[:8])
            raise BatchError(
                f"no ids were found in the first batch, a {self.kind}"
                f"{' in which ' + found if found else ''}: ids are {ACCEPTED}"
            )

    def extract(self, batch: object, names: Sequence[str], number: int) -> dict[str, npt.NDArray[np.int64]]:
        """The ids of the named features, one after another as they stand in the batch."""
        ids = {}
        for name in names:
            try:
                leaf = self._leaf(batch, name)
                values = values_of(leaf)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
                raise BatchError(
                    f"batch {number} has no ids of feature {name!r} at {'.'.join(self.paths[name]) or 'its top'}, "
                    f"where batch 0 had them; it has {_names(batch)}"
                    f"{f', and there {error}' if isinstance(error, NoIdsError) else ''}"
                ) from error
            if name in self._guessed:
                _check_offsets(name, leaf, number)
            ids[name] = values.detach().to("cpu", torch.int64).contiguous().numpy().reshape(-1)
        return ids

    def ids_in(self, batch: object, name: str) -> Tensor:
        """The tensor of a feature's ids in a batch that has been read before."""
        return values_of(self._leaf(batch, name))

    def without(self, batch: Any, names: Sequence[str]) -> Any:
        """The same batch without the ids of these features: their number, type and shape are left, and no memory."""
        return self._replaced(batch, names, lambda _, ids: nothing(ids.numel(), ids.dtype))

    def replace(self, batch: Any, values: Mapping[str, Tensor]) -> Any:
        """The same batch with other numbers in the place of the named features' ids, type and shape as they were."""
        return self._replaced(batch, list(values), lambda name, ids: values[name].to(ids.dtype))

    def _leaf(self, batch: object, name: str) -> Any:
        value: Any = batch
        for step in self.paths[name]:
            value = child_of(value, step)
        return value

    def _replaced(self, batch: Any, names: Sequence[str], new: NewIds) -> Any:
        tree: Tree = {}
        for name in names:
            branch, *steps = tree, *self.paths[name]
            if not steps:
                return _with_values(batch, name, new)
            for step in steps[:-1]:
                branch = branch.setdefault(step, {})
            branch[steps[-1]] = name
        return _rebuild(batch, tree, new)


class NoIdsError(TypeError):
    """Where ids should be, there is something else."""


def values_of(leaf: Any) -> Tensor:
    """The tensor of ids in a leaf."""
    if isinstance(leaf, Ids):
        return leaf.values
    values = leaf[0] if isinstance(leaf, list | tuple) else leaf
    if not _is_integers(values):
        raise NoIdsError(f"is {described(values)}")
    assert isinstance(values, Tensor)
    return values


def _leaves(value: Any, path: Path, within: tuple[int, ...], others: dict[str, str]) -> Iterator[tuple[Path, bool]]:
    """Where ids are, and whether they are a pair of which names must say what it is; the rest is added to `others`."""
    if id(value) in within:
        return  # an object that refers to one that holds it
    if isinstance(value, Ids) or _is_integers(value):
        yield path, False
    elif path and is_pair(value):
        yield path, True
    elif is_keyed(value):
        yield from (((*path, key), False) for key in value.keys())  # noqa: SIM118  (not a mapping)
    else:
        parts = list(parts_of(value))
        if not parts:
            others |= dict.fromkeys(_names_of(path) if path else {"it"}, described(value))
        for name, part in parts:
            yield from _leaves(part, (*path, name), (*within, id(value)), others)


def _names_of(path: Path) -> set[str]:
    return {path[-1], ".".join(path)}


def _check_offsets(name: str, leaf: Any, number: int) -> None:
    values, offsets = leaf[:2]
    good = len(offsets) == 0 or (
        int(offsets[0]) == 0 and int(offsets[-1]) <= len(values) and bool((offsets[1:] >= offsets[:-1]).all())
    )
    if not good:
        raise BatchError(
            f"batch {number}: {name!r} is a pair of tensors, taken for the values and offsets of bags, but the second "
            f"has no offsets of {len(values)} values (from 0, never falling): if they are two features, say so with "
            f"features={{'{name}.0': ..., '{name}.1': ...}}, and if they are bags of another kind, with "
            f"features={{{name!r}: ...}}"
        )


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, by name; nothing if it is none."""
    # In lists: what is read ahead is looked at by two threads, and a loader may still be adding to its own things.
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in list(value.items()))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(position), part) for position, part in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((part.name, getattr(value, part.name)) for part in dataclasses.fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | torch.nn.Module | type):
        yield from list(vars(value).items())


def child_of(value: Any, name: str) -> Any:
    """The part of a container that has this name."""
    if isinstance(value, Mapping):
        return value[name] if name in value else value[_key(value, name)]
    if is_keyed(value):
        return value[name].values()
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return value[int(name)]
    return getattr(value, name)


def _key(value: Mapping[Any, Any], name: str) -> Any:
    """The key of a mapping whose text this is."""
    return next((key for key in value if str(key) == name), name)


def nothing(length: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers that have a length and take no memory."""
    return torch.zeros(1, dtype=dtype).expand(length)


def _rebuild(value: Any, tree: Tree, ids: NewIds) -> Any:
    if is_keyed(value):
        return _rebuild_keyed(value, tree, ids)
    new = {}
    for name, inner in tree.items():
        part = child_of(value, name)
        new[name] = _rebuild(part, inner, ids) if isinstance(inner, dict) else _with_values(part, inner, ids)
    return with_parts(value, new)


def with_parts(value: Any, new: Mapping[str, Any]) -> Any:
    """A copy of a value in which the parts of these names are others; see `parts_of`."""
    if isinstance(value, Mapping):
        return _with_items(value, {name if name in value else _key(value, name): part for name, part in new.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._replace(**new)  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return type(value)(new.get(str(position), part) for position, part in enumerate(value))
    return _with_attributes(value, new)


def _with_items(value: Mapping[Any, Any], new: Mapping[Any, Any]) -> Any:
    if type(value) is dict or not isinstance(value, MutableMapping):
        return {**value, **new}
    other = copy.copy(value)
    other.update(new)
    return other


def _with_attributes(value: Any, new: Mapping[str, Any]) -> Any:
    other = copy.copy(value)
    set_attributes(other, new)
    return other


def set_attributes(value: Any, new: Mapping[str, Any]) -> None:
    """Set attributes of an object that nobody else has yet."""
    set_attribute = object.__setattr__ if dataclasses.is_dataclass(value) else setattr  # some are frozen
    for name, part in new.items():
        set_attribute(value, name, part)


def _with_values(leaf: Any, name: str, ids: NewIds) -> Any:
    before = values_of(leaf)
    shaped = ids(name, before).reshape(before.shape)
    if isinstance(leaf, Ids):
        return _with_attributes(leaf, {"values": shaped})
    return type(leaf)((shaped, *leaf[1:])) if isinstance(leaf, list | tuple) else shaped


def _rebuild_keyed(value: Any, tree: Tree, ids: NewIds) -> Any:
    before = [(key, value[key].values()) for key in value.keys()]  # noqa: SIM118
    parts = [ids(tree[key], values) if key in tree else values for key, values in before]
    weights = getattr(value, "weights_or_none", None)
    return type(value)(
        keys=list(value.keys()),
        values=torch.cat([part.reshape(-1) for part in parts]),
        weights=weights() if weights else None,
        lengths=value.lengths(),
    )


def _is_integers(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in INTEGERS


def is_pair(value: Any) -> bool:
    """Whether this may be (values, offsets) or (values, offsets, weights); it may also be features side by side."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or len(value) not in (2, 3):
        return False
    if not all(isinstance(part, Tensor) and part.dim() == 1 for part in value):
        return False
    return (
        value[0].dtype in INTEGERS
        and value[1].dtype in (torch.int64, torch.int32)
        and (len(value) == 2 or value[2].is_floating_point())
    )


def described(value: Any) -> str:
    """Type and shape of a value, in a few words."""
    if isinstance(value, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(value, Tensor) else "a NumPy array"
        shape = "nested" if isinstance(value, Tensor) and value.is_nested else str(tuple(value.shape))
        return f"{kind} of {str(value.dtype).removeprefix('torch.')} and shape {shape}"
    return f"a {type(value).__name__}"


def is_keyed(value: Any) -> bool:
    """Whether this has the methods of a KeyedJaggedTensor."""
    return all(callable(getattr(value, name, None)) for name in ("keys", "values", "lengths", "offsets")) and hasattr(
        value, "__getitem__"
    )


def _names(batch: Any) -> str:
    return ", ".join(repr(".".join(path)) for path, _ in _leaves(batch, (), (), {})) or "none"
