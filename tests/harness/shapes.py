"""Batches of four samples in every shape that loaders give them in, each with its features."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import torch

from bagpipe.types import Batch, Ids
from harness.fake_kjt import KeyedJagged

Pair = namedtuple("Pair", ["sparse", "labels"])


@dataclass(frozen=True)
class Custom:
    ids: dict
    dense: torch.Tensor


BAGS = (torch.tensor([10, 20, 21, 22, 40, 41]), torch.tensor([0, 1, 4, 4]))
"""Four samples: one id, three, none, two."""
WEIGHTS = torch.arange(6.0)
A, B = torch.tensor([1, 2, 3, 4]), torch.tensor([[5, 6], [7, 8], [9, 10], [11, 12]])
LABELS = torch.tensor([0.0, 1.0, 2.0, 3.0])


def keyed():
    lengths = torch.tensor([1, 1, 1, 1, 1, 3, 0, 2])
    return KeyedJagged(["a", "b"], torch.cat([A, BAGS[0]]), torch.arange(10.0), lengths)


BATCHES = {
    "a dict of tensors": ({"a": A, "b": B, "x": LABELS}, ["a", "b"]),
    "a tuple with a dict": ((LABELS, {"a": A, "b": B}, LABELS[:, None]), ["a", "b"]),
    "a list with positions": ([A, B, LABELS], ["0", "1"]),
    "values and offsets": ({"a": BAGS, "b": (*BAGS, WEIGHTS), "y": LABELS}, ["a", "b"]),
    "a list as pair": ({"a": [*BAGS], "y": LABELS}, ["a"]),
    "values and lengths": ({"a": (BAGS[0], torch.tensor([1, 2, 1, 2])), "y": LABELS}, ["a"]),
    "a named tuple": (Pair({"a": A, "b": B}, LABELS), ["a", "b"]),
    "a dataclass": (Custom({"a": A, "b": B}, LABELS), ["a", "b"]),
    "an object": (SimpleNamespace(a=A, b=B, y=LABELS), ["a", "b"]),
    "a batch": (
        Batch(torch.arange(8.0).reshape(4, 2), {"a": Ids(B), "b": Ids(*BAGS, WEIGHTS)}, LABELS, number=3),
        ["a", "b"],
    ),
    "weighted ids without offsets": ({"a": Ids(B, None, torch.rand(4, 2)), "y": LABELS}, ["a"]),
    "a keyed jagged tensor": ({"k": keyed(), "y": LABELS}, ["a", "b"]),
    "a keyed jagged tensor alone": (keyed(), ["a", "b"]),
    "an ordered dict": (OrderedDict(b=B, a=A), ["a", "b"]),
    "a mapping of another kind": (MappingProxyType({3: A, "b": B}), ["3", "b"]),
    "a bare tensor": (A, [""]),
    "two features side by side": (((A, A.clone()), LABELS), ["0", "1"]),
    "small integers": (
        {"a": A.to(torch.int16), "b": (BAGS[0].to(torch.uint8), BAGS[1].int()), "y": LABELS},
        ["a", "b"],
    ),
}


def fields(value):
    if isinstance(value, dict | MappingProxyType):
        return list(value.values())
    return list(vars(value).values()) if hasattr(value, "__dict__") else [value.dense, value.sparse, value.labels]


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, KeyedJagged):
        yield from (value.values(), value.lengths(), value.weights_or_none())
    elif isinstance(value, Ids):
        yield from (part for part in (value.values, value.offsets, value.weights) if part is not None)
    else:
        for part in value if isinstance(value, list | tuple) else fields(value):
            yield from tensors(part)
