"""Captures and restores the state of a trainer besides its rows: generators and buffers, and of the first one all that
they share.

A state is a tree of plain values and tensors of its own, captured between two iterations, so that training can go on
while it is written. It is compared with what is there before it is restored: a difference is named and changes nothing.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bagpipe.checkpoint.tree import is_plain, octets, unpack_tree
from bagpipe.errors import CheckpointError, ModelError
from bagpipe.row_parameter import dense_parameters_of

FIRST = "trainer-0"
"""Whose blob has what all trainers share."""

Tree = dict[str, Any]


@runtime_checkable
class Stateful(Protocol):
    """An optimizer, a scheduler, a scaler: anything whose state can be taken and given back."""

    def state_dict(self) -> Any:
        """All of it, as plain values and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from it."""


Attachable = Stateful | torch.Generator


def blob_name(rank: int) -> str:
    """What the blob of a trainer is called."""
    return f"trainer-{rank}"


def read_state(blob: bytes, name: str, done: int) -> Tree:
    """What a trainer kept; CheckpointError if it is of another moment, or lacks something that a loop goes on with."""
    tree = unpack_tree(blob)
    if not isinstance(tree, dict) or tree.get("done") != done:
        raise CheckpointError(f"what {name} kept is not of {done} iterations: use another checkpoint")
    for part, is_right in (_PARTS | _PARTS_OF_FIRST if name == FIRST else _PARTS).items():
        if part not in tree or not is_right(tree[part]):
            found = f"a {type(tree[part]).__name__} of another form" if part in tree else "nothing"
            raise CheckpointError(
                f"what {name} kept of {done} iterations has {found} in the place of {part!r}: use another checkpoint"
            )
    return tree


def _are_tensors(part: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(value, Tensor) for value in part.values())


def _are_states(part: Any) -> bool:
    return isinstance(part, dict) and all(
        isinstance(state, dict) and {"kind", "state"} <= state.keys() for state in part.values()
    )


def _is_progress(part: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(part.get(name), dict) for name in ("optimizer", "data"))


def _are_generators(part: Any) -> bool:
    return part is None or (isinstance(part, dict) and {"torch", "numpy", "python"} <= part.keys())


_PARTS = {"generators": _are_generators, "buffers": _are_tensors, "own": _are_states}
_PARTS_OF_FIRST = {"parameters": _are_tensors, "attached": _are_states, "loop": _is_progress}


def check_attachable(objects: Mapping[str, object]) -> None:
    """ModelError if one of them has no state that can be kept."""
    for name, thing in objects.items():
        if not isinstance(thing, Stateful | torch.Generator):
            raise ModelError(
                f"{name!r} is a {type(thing).__name__}: register what has state_dict() and load_state_dict(), or a "
                "torch.Generator"
            )


class Attached:
    """Objects of a training loop that are kept with it, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Attachable] = {}
        self.asked = False
        """Whether the loop has said which objects these are, if only that there are none."""

    def add(self, objects: Mapping[str, Attachable]) -> None:
        """ModelError if one can't be kept or is there already."""
        check_attachable(objects)
        if twice := objects.keys() & self.objects.keys():
            raise ModelError(f"something is registered as {min(twice)!r} already: choose another name")
        self.asked = True
        self.objects.update(objects)

    def saved(self, copies: Copies, *, own: bool) -> Tree:
        """Their states: of those that each trainer has for itself, which generators are, or of the others."""
        return {
            name: {"kind": _kind(thing), "state": copies.copied(_state(thing))}
            for name, thing in self.objects.items()
            if is_own(thing) == own
        }

    def check_names(self, saved: Set[str], begin: Set[str] = frozenset()) -> None:
        """CheckpointError unless these are the objects whose states were saved, but for those that may `begin` here."""
        if self.objects.keys() - begin != saved - begin:
            raise CheckpointError(
                f"the run to go on from had attached {named(saved)}, and this one has {named(self.objects)}: call "
                "loader.register_for_checkpointing(...) before the first batch, with the same objects"
            )


def restore(name: str, thing: Attachable, saved: Mapping[str, Any]) -> None:
    """Give an object the state back that it had when it was kept; CheckpointError if it was something else."""
    if name not in saved:
        raise CheckpointError(
            f"the run to go on from had attached {named(saved)}, and not {name!r}: register the same under the same "
            "names"
        )
    kind, state = saved[name]["kind"], saved[name]["state"]
    if kind != _kind(thing):
        raise CheckpointError(
            f"{name!r} was of class {kind} when it was kept, and is of class {_kind(thing)}: register "
            "the same, or with bagpipe train set dense_optimizer.name to it"
        )
    try:
        if isinstance(thing, torch.Generator):
            thing.set_state(state)
        else:
            thing.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{name!r} can't take over the state that was kept: {error}") from error


def generator_states() -> Tree:
    """Where the generators are that a program uses without naming one: PyTorch's, NumPy's and Python's."""
    name, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - which models may use
    version, words, gauss_next = random.getstate()
    states: Tree = {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), int(place), int(has_gauss), float(gauss)],
        "python": [version, torch.from_numpy(np.array(words, np.int64)), gauss_next],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Put them there again; CheckpointError if they are none."""
    try:
        torch.set_rng_state(states["torch"])
        name, keys, place, has_gauss, gauss = states["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, gauss))  # noqa: NPY002
        version, words, gauss_next = states["python"]
        random.setstate((version, tuple(words.tolist()), gauss_next))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint's random generator state is invalid: {error}") from error


class Copies:
    """Copies of trees, in memory that is kept from one mark to the next.

    Fresh memory would cost a page fault every 4 KiB, which takes longer than the copy. And tensors are copied without
    letting go of the interpreter: whoever wants it back waits for as long as another thread likes to compute.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Any]] = {}
        self._used: dict[tuple[Any, ...], list[Any]] = {}

    def begin(self) -> None:
        """All copies made so far may be written over; memory that the last ones did not need is given back."""
        self._free, self._used = self._used, {}

    def copied(self, value: Any) -> Any:
        """The same tree with tensors, arrays and collections of its own."""
        if isinstance(value, Tensor):
            return self._tensor(value.detach()) if is_plain(value) else value.detach().to("cpu", copy=True)
        if isinstance(value, np.ndarray):
            array = self._memory((np.ndarray, value.dtype, value.shape), lambda: np.empty(value.shape, value.dtype))
            np.copyto(array, value)
            return array
        if isinstance(value, dict):
            parts = copy.copy(value)  # also of OrderedDict and Counter
            for key, part in value.items():
                parts[key] = self.copied(part)
            return parts
        if type(value) in (list, tuple):
            return type(value)(self.copied(part) for part in value)
        return copy.copy(value)

    def _tensor(self, value: Tensor) -> Tensor:
        found: Tensor = self._memory((Tensor, value.dtype, value.shape), lambda: torch.empty_like(
            value, device="cpu", memory_format=torch.contiguous_format
        ))  # fmt: skip
        if value.device.type == "cpu" and value.is_contiguous() and value.numel() > 1:
            # One thread, as there is no core for a second one while rows are read ahead.
            octets(found).numpy().data[:] = octets(value).numpy().data
        else:
            found.copy_(value)
        return found

    def _memory(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        free = self._free.get(key)
        found = free.pop() if free else make()
        self._used.setdefault(key, []).append(found)
        return found


def check_tensors(kind: str, saved: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    """CheckpointError unless tensors of these names, shapes and types were saved."""
    for names, what in ((here.keys() - saved.keys(), "was not kept"), (saved.keys() - here.keys(), "is not here")):
        if names:
            more = f", like {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{kind} {min(names)!r} {what}{more}: build the model that was trained")
    for name, value in here.items():
        there = saved[name]
        if (there.shape, there.dtype) != (value.shape, value.dtype):
            raise CheckpointError(
                f"{kind} {name!r} has shape {tuple(there.shape)} of {there.dtype} in what was kept, and "
                f"{tuple(value.shape)} of {value.dtype} here: build the model that was trained"
            )


def set_tensors(here: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved values into the tensors of a model, where they are."""
    with torch.no_grad():
        for name, value in here.items():
            value.copy_(saved[name])


def dense_parameters(model: nn.Module, without: Iterable[nn.Module] = ()) -> dict[str, Tensor]:
    """The parameters of a model by name, but for those of some of its layers."""
    left_out = {id(value) for layer in without for value in layer.parameters()}
    found: dict[str, Tensor] = {name: value for name, value in dense_parameters_of(model) if id(value) not in left_out}
    for name, value in found.items():
        if is_lazy(value):
            raise CheckpointError(f"parameter {name!r} has no shape yet: call the model once before it is kept")
    return found


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a model by name."""
    return dict(model.named_buffers())


def _kind(thing: object) -> str:
    return str(getattr(thing, "kind", type(thing).__name__))


def _state(thing: Attachable) -> Any:
    return thing.get_state() if isinstance(thing, torch.Generator) else thing.state_dict()


def is_own(thing: Attachable) -> bool:
    """Whether each trainer has one with a state of its own."""
    return isinstance(thing, torch.Generator) or bool(getattr(thing, "own_of_each_trainer", False))


def without_rates(state: Mapping[str, Any]) -> Tree:
    """The counters of row optimizers without their learning rates."""
    return {
        name: without_rates(part) if isinstance(part, Mapping) else part for name, part in state.items() if name != "lr"
    }


def named(names: Iterable[str]) -> str:
    """For messages."""
    return ", ".join(map(repr, sorted(names))) or "nothing"
