"""Finds the ids in whatever a loader yields, and puts other numbers in their place.

Batches may be dicts, tuples, named tuples, dataclasses or plain objects, nested; ids may be integer tensors, `Ids`,
(values, offsets[, weights]) tuples, or a KeyedJaggedTensor, known by its methods. Everything else passes through
untouched. A feature's name is its key; where two places use the same key, the whole path, joined with dots.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
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
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Adapter:
    """Knows where a loader's batches hold their ids; learnt from the first one."""

    def __init__(self, example: object) -> None:
        paths = list(_leaves(example, (), ()))
        last = Counter(path[-1] if path else "" for path in paths)
        self.paths: dict[str, Path] = {
            path[-1] if path and last[path[-1]] == 1 else ".".join(path): path for path in paths
        }

    def require(self, names: Sequence[str]) -> None:
        """BatchError if a feature was not there in the first batch."""
        for name in names:
            if name not in self.paths:
                found = ", ".join(map(repr, self.paths)) or "none"
                raise BatchError(f"the batches have no ids of feature {name!r}; they have {found}")

    def extract(self, batch: object, names: Sequence[str], number: int) -> dict[str, npt.NDArray[np.int64]]:
        """The ids of the named features, one after another as they stand in the batch."""
        ids = {}
        for name in names:
            value: Any = batch
            try:
                for step in self.paths[name]:
                    value = _child(value, step)
                values = values_of(value)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
                raise BatchError(
                    f"batch {number} has no ids of feature {name!r} at {'.'.join(self.paths[name]) or 'its top'}, "
                    f"where batch 0 had them; it has {_names(batch)}"
                ) from error
            ids[name] = values.detach().to("cpu", torch.int64).contiguous().numpy().reshape(-1)
        return ids

    def replace(self, batch: Any, values: Mapping[str, Tensor]) -> Any:
        """The same batch with other numbers in the place of the named features' ids, shapes as they were."""
        tree: Tree = {}
        for name in values:
            branch, *steps = tree, *self.paths[name]
            if not steps:
                return _with_values(batch, values[name])
            for step in steps[:-1]:
                branch = branch.setdefault(step, {})
            branch[steps[-1]] = name
        return _rebuild(batch, tree, values)


def values_of(leaf: Any) -> Tensor:
    """The tensor of ids in a leaf."""
    if isinstance(leaf, Ids):
        return leaf.values
    values = leaf[0] if isinstance(leaf, list | tuple) else leaf
    if not isinstance(values, Tensor) or values.dtype not in INTEGERS:
        raise TypeError(f"ids are {values.dtype if isinstance(values, Tensor) else type(values).__name__}")
    return values


def _leaves(value: Any, path: Path, within: tuple[int, ...]) -> Iterator[Path]:
    if id(value) in within:
        return  # an object that refers to one that holds it
    if isinstance(value, Ids) or _is_integers(value) or (path and _is_bags(value)):
        yield path
    elif _is_keyed(value):
        yield from ((*path, key) for key in value.keys())  # noqa: SIM118  (not a mapping)
    else:
        for name, part in _parts(value):
            yield from _leaves(part, (*path, name), (*within, id(value)))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(position), part) for position, part in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((part.name, getattr(value, part.name)) for part in dataclasses.fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | torch.nn.Module | type):
        yield from vars(value).items()


def _child(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value[name] if name in value else value[_key(value, name)]
    if _is_keyed(value):
        return value[name].values()
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return value[int(name)]
    return getattr(value, name)


def _key(value: Mapping[Any, Any], name: str) -> Any:
    """The key of a mapping whose text this is."""
    return next((key for key in value if str(key) == name), name)


def _rebuild(value: Any, tree: Tree, values: Mapping[str, Tensor]) -> Any:
    if _is_keyed(value):
        return _rebuild_keyed(value, tree, values)
    new = {}
    for name, inner in tree.items():
        part = _child(value, name)
        new[name] = _rebuild(part, inner, values) if isinstance(inner, dict) else _with_values(part, values[inner])
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
    set_attribute = object.__setattr__ if dataclasses.is_dataclass(value) else setattr  # some are frozen
    for name, part in new.items():
        set_attribute(other, name, part)
    return other


def _with_values(leaf: Any, values: Tensor) -> Any:
    shaped = values.reshape(values_of(leaf).shape)
    if isinstance(leaf, Ids):
        return _with_attributes(leaf, {"values": shaped})
    return type(leaf)((shaped, *leaf[1:])) if isinstance(leaf, list | tuple) else shaped


def _rebuild_keyed(value: Any, tree: Tree, values: Mapping[str, Tensor]) -> Any:
    parts = [values[tree[key]] if key in tree else value[key].values() for key in value.keys()]  # noqa: SIM118
    weights = getattr(value, "weights_or_none", None)
    return type(value)(
        keys=list(value.keys()),
        values=torch.cat([part.reshape(-1) for part in parts]),
        weights=weights() if weights else None,
        lengths=value.lengths(),
    )


def _is_integers(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in INTEGERS


def _is_bags(value: Any) -> bool:
    """Whether this is (values, offsets) or (values, offsets, weights), and not two features side by side."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or len(value) not in (2, 3):
        return False
    if not all(isinstance(part, Tensor) and part.dim() == 1 for part in value):
        return False
    values, offsets = value[:2]
    ends = [*offsets[:1].tolist(), *offsets[-1:].tolist()]
    return (
        values.dtype in INTEGERS
        and offsets.dtype in (torch.int64, torch.int32)
        and (not ends or (ends[0] == 0 and ends[1] <= len(values) and bool((offsets[1:] >= offsets[:-1]).all())))
        and (len(value) == 2 or (value[2].is_floating_point() and value[2].shape == values.shape))
    )


def _is_keyed(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("keys", "values", "lengths", "offsets")) and hasattr(
        value, "__getitem__"
    )


def _names(batch: Any) -> str:
    return ", ".join(repr(".".join(path)) for path in _leaves(batch, (), ())) or "none"
