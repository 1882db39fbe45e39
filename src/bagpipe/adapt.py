"""Finds the ids in whatever a loader yields, and puts other numbers in their place.

Batches may be dicts, tuples, named tuples, dataclasses or plain objects, nested; ids may be integer tensors, `Ids`,
(values, offsets[, weights]) tuples, or a KeyedJaggedTensor, known by its methods. Everything else passes through
untouched. A feature's name is its key; where two places use the same key, the whole path, joined with dots.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bagpipe.errors import BatchError
from bagpipe.types import Ids

Path = tuple[str, ...]
Leaf = Any
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Adapter:
    """Knows where a loader's batches hold their ids; learnt from the first one."""

    def __init__(self, example: object) -> None:
        paths = [path for path, _ in _leaves(example, ())]
        last = Counter(path[-1] if path else "" for path in paths)
        self.paths: dict[str, Path] = {
            path[-1] if path and last[path[-1]] == 1 else ".".join(path): path for path in paths
        }

    def extract(self, batch: object, names: tuple[str, ...], number: int) -> dict[str, npt.NDArray[np.int64]]:
        """The ids of the named features, one after another as they stand in the batch."""
        found = dict(_leaves(batch, ()))
        ids = {}
        for name in names:
            leaf = found.get(self.paths[name])
            if leaf is None:
                raise BatchError(f"batch {number} has no ids of feature {name!r}; it has {_names(found)}")
            ids[name] = values_of(leaf).detach().to("cpu", torch.int64).contiguous().numpy().reshape(-1)
        return ids

    def replace(self, batch: Any, values: Mapping[str, Tensor]) -> Any:
        """The same batch with other numbers in the place of the named features' ids, shapes as they were."""
        return _rebuild(batch, (), {self.paths[name]: tensor for name, tensor in values.items()})


def values_of(leaf: Leaf) -> Tensor:
    """The tensor of ids in a leaf."""
    if isinstance(leaf, Ids):
        return leaf.values
    if isinstance(leaf, tuple):
        return leaf[0] if isinstance(leaf[0], Tensor) else torch.as_tensor(leaf[0])
    assert isinstance(leaf, Tensor)
    return leaf


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Leaf]]:
    if _is_ids(value) and (path or not isinstance(value, tuple)):
        yield path, value
    elif _is_keyed(value):
        for key in value.keys():  # noqa: SIM118  (not a mapping)
            yield (*path, key), value[key].values()
    else:
        for name, part in _parts(value):
            yield from _leaves(part, (*path, name))


def _rebuild(value: Any, path: Path, new: Mapping[Path, Tensor]) -> Any:
    if not any(target[: len(path)] == path for target in new):
        return value
    if path in new:
        return _with_values(value, new[path])
    if _is_keyed(value):
        return _rebuild_keyed(value, path, new)
    parts = {name: _rebuild(part, (*path, name), new) for name, part in _parts(value)}
    if isinstance(value, Mapping):
        return {key: parts.get(str(key), part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_replace"):
        return value._replace(**parts)
    if isinstance(value, list | tuple):
        return type(value)(parts.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **parts)
    other = copy.copy(value)
    for name, part in parts.items():
        setattr(other, name, part)
    return other


def _with_values(leaf: Leaf, values: Tensor) -> Leaf:
    shaped = values.reshape(values_of(leaf).shape)
    if isinstance(leaf, Ids):
        return Ids(shaped, leaf.offsets, leaf.weights)
    return (shaped, *leaf[1:]) if isinstance(leaf, tuple) else shaped


def _rebuild_keyed(value: Any, path: Path, new: Mapping[Path, Tensor]) -> Any:
    parts = [new.get((*path, key), value[key].values()).reshape(-1) for key in value.keys()]  # noqa: SIM118
    weights: Callable[[], Tensor | None] | None = getattr(value, "weights_or_none", None)
    return type(value)(
        keys=list(value.keys()),
        values=torch.cat(parts),
        weights=weights() if weights else None,
        lengths=value.lengths(),
    )


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


def _is_ids(value: Any) -> bool:
    if isinstance(value, Ids):
        return True
    if isinstance(value, Tensor):
        return value.dtype in INTEGERS
    return (
        isinstance(value, tuple)
        and not hasattr(value, "_fields")
        and len(value) in (2, 3)
        and all(isinstance(part, Tensor) and part.dim() == 1 for part in value)
        and value[0].dtype in INTEGERS
        and value[1].dtype in (torch.int64, torch.int32)
        and (len(value[1]) == 0 or int(value[1][0]) == 0)
        and (len(value) == 2 or (value[2].is_floating_point() and value[2].shape == value[0].shape))
    )


def _is_keyed(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("keys", "values", "lengths", "offsets")) and hasattr(
        value, "__getitem__"
    )


def _names(found: Mapping[Path, Leaf]) -> str:
    return ", ".join(repr(".".join(path)) for path in found) or "none"
