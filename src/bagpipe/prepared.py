"""`bagpipe.prepare`: a model, its optimizer and its loader in, the same three out, the embedding tables out of the way.

The optimizer stays the object that the user built, with a class whose `step` updates dense parameters and rows, both or
neither. The loader is iterated once an epoch, and again; its batches are the user's own. Everything that can't be done
exactly is refused, by name, before the model is touched or before anything moves (I1, I8).
"""

from __future__ import annotations

import atexit
import cmath
import math
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from bagpipe import optim
from bagpipe.arrays import Int64s
from bagpipe.build import PlanChoice, build_loop
from bagpipe.config import store_memory_bytes
from bagpipe.embedding import ROWS_PER_BLOCK, WEIGHT_BYTES_MAX, CachedLayer, RowReader
from bagpipe.errors import CheckpointError, ConfigError, GradientError, ModelError
from bagpipe.initial import Initial
from bagpipe.layers import Binding, FeatureMap
from bagpipe.policies.base import Policy
from bagpipe.policy_options import DEFAULTS, PolicyOptions, as_options
from bagpipe.row_parameter import STATE_NAMES, OfLayers, RowParameter, counts_steps, kind_of, translate
from bagpipe.script import Script
from bagpipe.signals import uninterrupted
from bagpipe.trainer.loop import TrainLoop
from bagpipe.trainer.pipeline import DEPTH
from bagpipe.trainer.reading import Epochs
from bagpipe.trainer.state import Attachable, Tree
from bagpipe.types import Table
from bagpipe.world import OpenStore

if TYPE_CHECKING:
    from bagpipe.checkpointing import Checkpointing
    from bagpipe.evaluation import EvaluationLoader

Model = TypeVar("Model", bound=nn.Module)
Optimizers = TypeVar("Optimizers", bound="torch.optim.Optimizer | Sequence[torch.optim.Optimizer]")
CLIP_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds to the norm."""
EXIT_DEADLINE_S = 10.0
"""For what is under way when the interpreter exits."""


@dataclass(frozen=True, slots=True)
class Cache:
    """The rows on the device, and what is known of their future."""

    size: int | str = "1GB"
    """A number of rows, bytes such as "2GB", optimizer state included, or a share of all rows such as "1.5%"."""
    lookahead: int | Literal["auto"] = "auto"
    """How many batches the oracle reads ahead, the current one included: a row whose next use is among them stays.
    "auto" reads as far as fills the cache, and lets rows go only when their place is needed."""
    policy: str | Policy = "lookahead"
    """What is kept; docs/policies.md tells which to choose, and how to write your own. An object is copied."""
    options: PolicyOptions | Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    """Settings of the policy, such as {"sample": 32}."""


@dataclass(frozen=True, slots=True)
class Files:
    """All rows in files without names, which end with the process: what outlives it is in checkpoints and exports."""

    path: str | Path | None = None
    """A directory; None: that of temporary files."""
    memory: str | None = None
    """How much of them the operating system may keep in memory, such as "4GB"; 1 GiB unless given."""

    def __post_init__(self) -> None:
        if self.memory is not None:
            store_memory_bytes(self.memory, "mapped", name="memory of bagpipe.Files")

    @property
    def place(self) -> str | Path:
        """As `prepare` takes it: a path is one whatever its name, "memory" too."""
        return "mapped" if self.path is None else Path(self.path)


@dataclass(frozen=True, slots=True)
class Options:
    """What is rarely set."""

    device: torch.device | str | None = None
    """Where the cache is; by default where the model's other parameters are."""
    seed: int = 0
    """Fixes the first values of tables on the meta device."""
    initial: Callable[[Table], Initial] | None = None
    """Makes them; by default N(0, 1), as PyTorch."""
    keep: Collection[str] = ()
    """Layers to leave as they are."""
    threads: int | None = None
    """For kernels; as torch uses by default."""
    depth: int = DEPTH
    """How many plans may be ready before they are trained."""
    check: bool = False
    """Follow every row and stop at the first wrong value; slow."""


def prepare(
    model: Model,
    optimizer: Optimizers,
    loader: Iterable[Any],
    *,
    rows: optim.RowOptimizer | optim.PerTable | None = None,
    cache: int | str | Cache = "1GB",
    store: str | Path | Files | OpenStore = "memory",
    features: FeatureMap | Sequence[Table] | None = None,
    accumulate: int = 1,
    checkpoint: Checkpointing | None = None,
    options: Options | None = None,
) -> tuple[Model, Optimizers, PreparedLoader]:
    """Move the embedding tables of a model out of the way; train as before, with exactly the same result.

    The model and the optimizer come back as the objects that they are; iterate over the loader that comes back. Its
    batches are those of the loader that was given, and their rows are on the device. `optimizer.step()` updates dense
    parameters and rows. To evaluate, call the model under `torch.no_grad()` with any batch.

    Args:
        model: Has `nn.EmbeddingBag` or `nn.Embedding` layers; those on the meta device take no memory.
        optimizer: One of torch's, or a list, built from the model's parameters before. The update of embedding weights
            is translated where it moves no row that a batch does not name: SGD, Adagrad and SparseAdam, without
            momentum and weight decay.
        loader: Yields batches of any shape (dicts, tuples, dataclasses, KeyedJaggedTensors), each in tensors of its
            own; it is read ahead, by another thread.
        rows: One of `bagpipe.optim` for the embedding rows instead, which has the last param group: rowwise Adagrad,
            lazy Adam, or a `PerTable`; a new one for each model, as it counts the updates.
        cache: Its size on the device: a number of rows, bytes such as "2GB", or a share of all rows such as "1.5%"; or
            a `bagpipe.Cache`.
        store: Where all rows live: "memory", a directory for files or a `bagpipe.Files`, or a function that opens a
            `bagpipe.store.Store` for the layouts of rows that it is given.
        features: Which layer or layers each feature feeds, where names do not tell, as a mapping; or names and sizes of
            the data's tables.
        accumulate: Batches an iteration: `optimizer.step()` follows every so many, and the last.
        checkpoint: Where and how often to write checkpoints, and which to go on from; docs/checkpoints.md tells how.
        options: What is rarely set: a `bagpipe.Options`.
    """
    _refuse_kinds(store, features, checkpoint, options)
    options = options or Options()
    cache = cache if isinstance(cache, Cache) else Cache(cache)
    memory = store.memory if isinstance(store, Files) else None
    place = store.place if isinstance(store, Files) else store
    given: Any = optimizer
    optimizers: list[torch.optim.Optimizer] = list(given) if isinstance(given, list | tuple) else [given]
    _refuse_optimizers(optimizers, rows)
    _refuse_prepared(model)
    script = Script(
        model, loader, PlanChoice(cache.size, cache.lookahead, cache.policy, as_options(cache.options)), place, memory,
        device=options.device, accumulate=accumulate,
        seed=options.seed, check=options.check, depth=options.depth, threads=options.threads,
    )  # fmt: skip
    mapping, tables = (features, ()) if features is None or isinstance(features, Mapping) else (None, features)
    binding = script.bind(mapping, tables, options.keep)
    parameters = row_parameters(binding, script.device)
    seats = _seats(optimizers, {id(layer.module.weight): layer.name for layer in binding.layers})
    if rows is None:
        for layer in binding.layers:
            seat = seats.get(layer.name)
            parameters[layer.name].rows = (
                optim.SGD(0.0) if seat is None else translate(seat.optimizer, seat.group, layer.name)
            )  # what is in no optimizer has gradients all the same
        groups = {name: id(seat.group) for name, seat in seats.items()}
        spec = script.lay_out(OfLayers(parameters, groups), options.initial)
    else:
        for name, seat in seats.items():
            if seat.group.get("maximize"):
                raise ConfigError(
                    f"the weight of layer {name!r} is in a {kind_of(seat.optimizer).__name__} with maximize=True, and "
                    "rows= would minimise: give the loss the other sign instead"
                )
        spec = script.lay_out(rows, options.initial)
    loop = build_loop(spec, script.world, checkpoint)
    prepared = PreparedLoader(loop, parameters, optimizers, seats, script.source.epochs)
    _GIVEN.update(_parts_of(rows))
    return model, optimizer, prepared


def row_parameters(binding: Binding, device: torch.device) -> dict[str, RowParameter]:
    """What stands for the weight of each embedding layer."""
    return {layer.name: RowParameter(layer.module.weight, layer.name, device) for layer in binding.layers}


class Seat(NamedTuple):
    """Where an optimizer has the weight of an embedding layer."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    place: int


def _seats(optimizers: Sequence[torch.optim.Optimizer], weights: Mapping[int, str]) -> dict[str, Seat]:
    """Where each weight is; ConfigError where that can't be taken over."""
    seats: dict[str, Seat] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for place, weight in enumerate(group["params"]):
                if id(weight) not in weights:
                    continue
                if any(other.optimizer is not optimizer for other in seats.values()):
                    raise ConfigError("embedding weights are in two optimizers: put them all into one")
                if float(optimizer.state.get(weight, {}).get("step", 0)):
                    raise ConfigError(
                        f"the weight of layer {weights[id(weight)]!r} was trained by this optimizer already: prepare "
                        "model and optimizer before training, and load a state by optimizer.load_state_dict() after it"
                    )
                seats[weights[id(weight)]] = Seat(optimizer, group, place)
    return seats


def _refuse_kinds(store: object, features: object, checkpoint: object, options: object) -> None:
    """ConfigError for what would fail later, and say less."""
    if not isinstance(store, str | Path | Files) and not callable(store):
        raise ConfigError(f"store is {store!r}: give 'memory', a directory, a bagpipe.Files or a function")
    tables = [] if features is None or isinstance(features, Mapping) else features
    if not isinstance(tables, Sequence) or not all(isinstance(table, Table) for table in tables):
        raise ConfigError(
            f"features is {features!r}: give a mapping such as {{'feature': 'layer'}}, or a list of bagpipe.Table"
        )
    if options is not None and not isinstance(options, Options):
        raise ConfigError(f"options is {options!r}: give a bagpipe.Options")
    if checkpoint is not None:
        from bagpipe.checkpointing import Checkpointing

        if not isinstance(checkpoint, Checkpointing):
            raise ConfigError(f"checkpoint is {checkpoint!r}: give a bagpipe.Checkpointing")


_GIVEN: weakref.WeakSet[optim.RowOptimizer] = weakref.WeakSet()
"""What was given as `rows`."""


def _parts_of(rows: object) -> list[optim.RowOptimizer]:
    if isinstance(rows, optim.PerTable):
        return [rows.default, *rows.tables.values()]
    return [rows] if isinstance(rows, optim.RowOptimizer) else []


def _refuse_optimizers(optimizers: Sequence[object], rows: object) -> None:
    if not optimizers:
        raise ConfigError("no optimizer is given: build one from model.parameters() and give it to bagpipe.prepare")
    if rows is not None and not isinstance(rows, optim.RowOptimizer | optim.PerTable):
        raise ConfigError(
            f"rows is a {type(rows).__name__}: give one of bagpipe.optim, such as bagpipe.optim.Adam(0.01)"
        )
    for part in _parts_of(rows):
        if part in _GIVEN:
            raise ConfigError(
                f"this {type(part).__name__} was given to bagpipe.prepare already, and counts the updates of that "
                "model: make a new one for each model"
            )
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(f"the optimizer is a {type(each).__name__}: give one of torch.optim, or a list of them")
        if isinstance(each, PreparedOptimizer):
            raise ConfigError(f"this {kind_of(each).__name__} was prepared already: build a new one for a new model")
        if isinstance(each, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS makes several passes over a batch within a step, with rows that move in between: use another"
            )
        step = vars(each).get("step")
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            raise ConfigError(
                f"the step of this {type(each).__name__} was replaced by something else: prepare it before that"
            )
        if rows is not None and any("initial_lr" in group for group in each.param_groups):
            raise ConfigError(
                "rows= adds a param group, and a scheduler has counted those that there are: build schedulers after "
                "bagpipe.prepare"
            )


def _refuse_prepared(model: object) -> None:
    for name, part in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(part, CachedLayer):
            raise ModelError(
                f"layer {name!r} was prepared already: iterate over the loader that bagpipe.prepare gave, as often as "
                "you like; to train on other data, build the model anew and load its weights"
            )


class PreparedOptimizer(torch.optim.Optimizer):
    """What the class of a prepared optimizer begins with: its `step` is that of dense parameters and rows."""

    kind: type[torch.optim.Optimizer]
    dense_step: Callable[[], object]
    _bagpipe: PreparedLoader

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update dense parameters and rows, both or neither."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # by which schedulers know that they come after
        self._bagpipe.step(self)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of dense parameters and rows."""
        for parameter in self._bagpipe.parameters_of(self):
            parameter.zero(set_to_none)
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As plain PyTorch would have it, with the state of all rows in the place of their weight's."""
        found = super().state_dict()
        found["state"] |= {
            place: self._bagpipe.state_of(parameter)
            for place, parameter in self._row_places()
            # Adagrad has one from its beginning.
            if self._bagpipe.steps_of(parameter) or issubclass(self.kind, torch.optim.Adagrad)
        }
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """From this, or from plain PyTorch; refused amid an epoch."""
        states = dict(state_dict["state"])
        of_rows = [(parameter, states.pop(place)) for place, parameter in self._row_places() if place in states]
        self._bagpipe.check_states(of_rows)
        self._load({**state_dict, "state": states}, nullcontext(), keeps_rate=lambda rows: callable(rows.lr))
        for parameter, state in of_rows:
            self._bagpipe.load_state_of(parameter, state)
        self._bagpipe.count_loaded(of_rows)

    def dense_state(self) -> Tree:
        """That of dense parameters, numbered without rows, and all settings: other tables may be there later."""
        with self.dense_alone():
            return super().state_dict()

    def load_dense_state(self, state: Tree) -> None:
        """From `dense_state`. In a run that begins, with the state of another one, rows have the rate it gives them."""
        begins = not self._bagpipe.loop.done
        self._load(state, self.dense_alone(), keeps_rate=lambda rows: begins or callable(rows.lr))

    @contextmanager
    def dense_alone(self) -> Iterator[None]:
        """Without the weights of embedding layers, which torch's own methods are not to see."""
        several = [group["params"] for group in self.param_groups]
        try:
            for group, parameters in zip(self.param_groups, several, strict=True):
                group["params"] = [each for each in parameters if not isinstance(each, RowParameter)]
            yield
        finally:
            for group, parameters in zip(self.param_groups, several, strict=True):  # a loaded state makes them anew
                group["params"] = parameters

    def _load(
        self,
        state: Mapping[str, Any],
        seen: AbstractContextManager[None],
        keeps_rate: Callable[[optim.RowOptimizer], bool],
    ) -> None:
        rates = [group["lr"] for group in self.param_groups]
        with seen:
            super().load_state_dict({**state})
        for group, rate in zip(self.param_groups, rates, strict=True):
            rows = self._bagpipe.given_rows(group)
            if rows is not None and keeps_rate(rows):
                group["lr"] = rate

    def _row_places(self) -> list[tuple[int, RowParameter]]:
        places = enumerate(each for group in self.param_groups for each in group["params"])
        return [(place, each) for place, each in places if isinstance(each, RowParameter)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError("a prepared optimizer can't be copied or pickled: keep optimizer.state_dict()")


_PREPARED: dict[type[torch.optim.Optimizer], type[PreparedOptimizer]] = {}


def _prepared_class(kind: type[torch.optim.Optimizer]) -> type[PreparedOptimizer]:
    """A class of the same name, whose hooks and profile see one step."""
    if kind not in _PREPARED:
        step: Any = torch.optim.Optimizer.profile_hook_step(PreparedOptimizer._step)
        # torch wraps the step of a class once, and a scheduler that of an instance, unless they see these.
        step.hooked = step._wrapped_by_lr_sched = True
        dense_step = getattr(kind.step, "__wrapped__", kind.step)
        parts = {"step": step, "dense_step": dense_step, "kind": kind, "__module__": kind.__module__}
        _PREPARED[kind] = type(kind.__name__, (PreparedOptimizer, kind), parts)
    return _PREPARED[kind]


class PreparedLoader:
    """The loader that was given, once an epoch and again; the rows of each of its batches are on the device.

    `for batch in loader` is one iteration, which ends with its last batch, by `break` or an exception, or when the next
    one begins: then every row is in the store, and nothing is left running. What goes wrong while it ends is raised
    by the next use, if nobody is there to be told.
    """

    def __init__(
        self,
        loop: TrainLoop,
        parameters: Mapping[str, RowParameter],
        optimizers: Sequence[torch.optim.Optimizer],
        seats: Mapping[str, Seat],
        epochs: Epochs | None = None,
    ) -> None:
        """Takes over the optimizers. Rows whose `parameters` say nothing else are updated as their layout says, in a
        param group of their own."""
        self._loop, self._parameters, self._epochs = loop, parameters, epochs
        self._optimizers = list(optimizers)
        self._owner = next((seat.optimizer for seat in seats.values()), optimizers[0])
        self._turn = 0
        """Iterations over it so far: who began an earlier one is told that it has ended."""
        self._epoch_is_known = self._registered = self._has_scheduler = False
        self._settings: dict[str, tuple[Any, ...]] = {}
        """Of each layer's group, as they were at the last step."""
        self._rates: dict[int, float] = {}
        """Of rows that were given, as their group was last told."""
        self._error: BaseException | None = None
        self._counted: set[str] | None = None
        """The layers of whose weights torch would have counted steps; None: those of the step that comes."""
        self._judged: tuple[int, set[int]] = -1, set()
        """A batch whose gradients of all optimizers were found to be finite, and who has not stepped since."""
        self._batch = 0
        """The number of the one that was given last."""
        self._seated = [parameters[name] for name in seats]
        """What is in a param group."""
        self._trained: set[str] | None = None
        """Where there are several trainers, the layers that may have momentum."""
        self._rows_given = False
        self._sharing: list[list[RowParameter]]
        """Those that share rows, where a step of one is to be a step of all."""
        self._layers: dict[str, CachedLayer] = {}
        for parameter in parameters.values():
            layer = loop.model.get_submodule(parameter.layer)
            assert isinstance(layer, CachedLayer)
            self._layers[parameter.layer] = layer
            if not hasattr(parameter, "rows"):
                self._rows_given, parameter.rows = True, loop.layouts[layer.table].optimizer
            layer.register_parameter("weight", parameter)
            parameter.owner = self
        self._sharing = [] if self._rows_given else _sharing(self._parameters.values())
        held = weakref.ref(self)
        atexit.register(lambda: None if (loader := held()) is None else loader._close_at_exit())
        for name, seat in seats.items():
            seat.optimizer.state.pop(seat.group["params"][seat.place], None)  # of Adagrad as large as the table
            seat.group["params"][seat.place] = self._parameters[name]
        if self._rows_given:
            for group in self._owner.param_groups:
                group["params"] = [each for each in group["params"] if not isinstance(each, RowParameter)]
            of_rows: dict[int, list[RowParameter]] = {}
            for parameter in self._parameters.values():
                of_rows.setdefault(id(parameter.rows), []).append(parameter)
            for several in of_rows.values():
                rate = self._rates[id(several[0].rows)] = _rate(several[0].rows)
                self._owner.add_param_group({"params": several, "lr": rate})
        for optimizer in optimizers:
            vars(optimizer).pop("step", None)  # of a scheduler, which calls that of the former class
            optimizer.__class__ = _prepared_class(type(optimizer))
            cast("PreparedOptimizer", optimizer)._bagpipe = self

    # Iteration

    def __iter__(self) -> Iterator[Any]:
        self._end_iteration()
        self._check_resumed()
        self._turn += 1
        self._loop.begin()
        return self._batches(self._turn, threading.current_thread())

    def __len__(self) -> int:
        if self._epochs is None:
            raise TypeError("this loader has no length")
        return len(self._epochs.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._epochs is None:
            raise AttributeError(name)
        return getattr(self._epochs.loader, name)  # its dataset, its sampler, its batch_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise  # otherwise the loop's own error says more than what it led to

    def close(self) -> None:
        """End the iteration: write every row back, stop the background work, free the cache. The model still evaluates,
        and the next `for` begins with an empty cache."""
        try:
            self._end_iteration()
        finally:
            self._loop.release()

    def flush(self) -> None:
        """Return when the store has every update so far; with several trainers all call it."""
        self._raise_error()
        self._loop.flush()

    def for_evaluation(self, loader: Iterable[Any]) -> EvaluationLoader:
        """Another loader, such as one of validation data, whose batches are read ahead with their rows: to iterate over
        under `torch.no_grad()`, as often as you like. Any other way of calling the model gives the same."""
        from bagpipe.evaluation import EvaluationLoader

        return EvaluationLoader(self._loop, loader)

    def stats(self) -> dict[str, Any]:
        """What the iteration under way, or the last one, has moved so far, and how long training waited for it."""
        return self._loop.stats()

    @property
    def loop(self) -> TrainLoop:
        """What trains."""
        return self._loop

    @property
    def epoch(self) -> int:
        """The number of the iteration under way, or of the one that comes next, counted from 0 over the whole run: a
        run that is resumed goes on with `for epoch in range(loader.epoch, N)`."""
        self._epoch_is_known = True
        return self._loop.epoch if self._loop.is_under_way else self._loop.epoch + 1

    def register_for_checkpointing(self, *objects: Attachable, **named: Attachable) -> None:
        """Save the states of these in checkpoints too, and restore them now where the run is one that was resumed:
        schedulers, a scaler, each `torch.Generator` that the model draws from. Model, optimizers and rows are saved by
        themselves, but nothing is before this was called, if with nothing. All trainers call it alike, before the
        first batch."""
        if not self._registered:
            for number, each in enumerate(self._optimizers):
                named = {f"dense{number or ''}": DenseState(each), **named}
        for thing in objects:
            name, number = type(thing).__name__, 2
            while name in named:
                name, number = f"{type(thing).__name__}{number}", number + 1
            named[name] = thing
        self._has_scheduler |= any(isinstance(each, LRScheduler) for each in named.values())
        self._loop.attach(**named)
        self._registered = True

    def _check_resumed(self) -> None:
        """What would be wrong in a run that is saved, or resumed, without anybody noticing."""
        if self._loop.epoch >= 0 and not self._turn and not self._epoch_is_known:
            raise CheckpointError(
                f"the run goes on in epoch {self._loop.epoch + 1}, and the script begins with epoch 0: write "
                "'for epoch in range(loader.epoch, N)', so that those that are over are not trained again"
            )
        scheduled = any("initial_lr" in group for each in self._optimizers for group in each.param_groups)
        if self._loop.is_saved and self._registered and scheduled and not self._has_scheduler:
            raise CheckpointError(
                "the optimizer has a scheduler, which checkpoints do not know of, so that a resumed run would begin "
                "with the first learning rate again: call loader.register_for_checkpointing(scheduler)"
            )

    @property
    def rank(self) -> int:
        """Which of the trainers this is, counted from 0."""
        return self._loop.rank

    @property
    def trainers(self) -> int:
        """How many trainers share the batches; 1 but under `bagpipe launch --trainers N`."""
        return self._loop.trainers

    @property
    def step_due(self) -> bool:
        """Whether the current batch is the last of its iteration, so that `optimizer.step()` follows it."""
        return self._loop.step_due

    def _batches(self, turn: int, thread: threading.Thread) -> Iterator[Any]:
        loop = self._loop
        batches = iter(loop)
        try:
            while True:
                if self._turn != turn:
                    raise ModelError(
                        "another iteration of this loader has begun, which ended this one: use one at a time"
                    )
                batch = next(batches, _END)
                if batch is _END:
                    return
                if self._epochs is not None:
                    self._epochs.given()
                self._batch += 1
                yield batch
                if self._turn == turn:
                    self._after_batch()
        except BaseException:  # also for a break, an exception in the body of the loop, or the collector, in any thread
            if threading.current_thread() is thread and self._turn == turn:
                self._after_batch()
                try:
                    loop.close()
                except BaseException as error:  # Python would drop it after a break
                    self._error = error
                    loop.lookups.reader = cast("RowReader", _Untold(self))
                self._broken_off()
            raise

    def _after_batch(self) -> None:
        """Plain PyTorch would go on having the gradients that nobody zeroed."""
        if self._loop.is_training and self._loop.step_due:
            self._leave_over(self._reached())

    def _broken_off(self) -> None:
        if self._epochs is not None:
            self._epochs.broken_off()

    def _end_iteration(self) -> None:
        """What was not ended where it could be told is ended now."""
        try:
            if self._loop.is_under_way:
                try:
                    self._loop.close()
                finally:
                    self._broken_off()
        finally:
            self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _close_at_exit(self) -> None:
        """A loader may block, and others may wait for us: both as long as this, and no longer."""
        closing = threading.Thread(target=self._close_quietly, name="bagpipe-exit", daemon=True)
        closing.start()
        closing.join(EXIT_DEADLINE_S)

    def _close_quietly(self) -> None:
        with suppress(Exception):
            self._loop.release()

    # The step

    def step(self, optimizer: PreparedOptimizer) -> None:
        """Update the dense parameters of an optimizer, and the rows if they are its own."""
        self._raise_error()
        loop, reached = self._loop, self._reached()
        shared = loop.trainers > 1 and loop.is_training
        if any(parameter.is_unzeroed for parameter in self.parameters_of(optimizer)):
            raise ModelError(
                "gradients of an earlier batch or step were not zeroed: plain PyTorch would use them once more. Call "
                "optimizer.zero_grad() once for each step; to add up the gradients of several batches, give "
                "accumulate=N to bagpipe.prepare"
            )
        if optimizer is self._owner and (reached or shared):
            self._check_rows(optimizer)
            counted = self._check_counts(reached)
            problem = self._problem(optimizer)
            try:
                if not shared and problem is not None:
                    loop.check_gradients()  # rows are named first, as they say more
                begun = loop.begin_step(problem)
            except GradientError:
                self._judged = -1, set()  # another optimizer may be tried all the same
                raise
            if begun:
                loop.finish_step(lambda: self._step_dense(optimizer, reached, counted))
            return
        problem = self._problem(optimizer, rows_follow=bool(reached))
        if problem is not None:
            raise GradientError(problem)
        counted = self._check_counts(()) if optimizer is self._owner else self._counted
        with uninterrupted():
            self._step_dense(optimizer, (), counted)

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> list[RowParameter]:
        """The weights of embedding layers that it has."""
        return list(self._parameters.values()) if optimizer is self._owner else []

    def _check_rows(self, optimizer: torch.optim.Optimizer) -> None:
        """Everything that can be refused before anything moves, and what the groups say now."""
        loop = self._loop
        if not loop.step_due:
            raise ModelError(
                "step() before the last batch of this iteration: with accumulate=N it follows every Nth batch and the "
                "last one, when loader.step_due is true"
            )
        if loop.trainers > 1 and loop.is_stepped:
            raise ModelError("step() twice for one batch: with several trainers call it once, after the backward pass")
        present = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for parameter in self._parameters.values() if self._rows_given else self._seated:
            if id(parameter) not in present:
                raise ConfigError(
                    f"the weight of layer {parameter.layer!r} was taken out of the param groups of its optimizer, and "
                    "its rows would be updated all the same: leave it there, and freeze it by "
                    "weight.requires_grad_(False)"
                )
        for group in optimizer.param_groups:
            given = self.given_rows(group)
            if given is not None:
                self._follow_rate(group, given)
                continue
            for parameter in group["params"]:
                if isinstance(parameter, RowParameter):
                    self._follow(optimizer, group, parameter)
        if loop.trainers > 1:
            self._check_frozen()

    def _check_frozen(self) -> None:
        """Several trainers update all rows of a batch, also those without a gradient: ModelError where that moves rows
        of a layer that is frozen."""
        if self._trained is None:  # a run that is resumed may have trained any of them
            self._trained = {each.layer for each in self._parameters.values() if each.rows.updates}
        for parameter in self._parameters.values():
            rows, layer = parameter.rows, self._layer(parameter)
            decays = isinstance(rows, optim.AdamW) and rows.weight_decay > 0
            if layer.wants_gradient:
                self._trained.add(parameter.layer)
            elif not rows.rests_at_zero and (decays or parameter.layer in self._trained):
                raise ModelError(
                    f"layer {parameter.layer!r} is frozen, and with several trainers {type(rows).__name__} would still "
                    f"move its rows, by {'their decay' if decays else 'the momentum that they have'}: give rows "
                    "SGD or Adagrad, or this layer a row optimizer of that kind by bagpipe.optim.PerTable"
                )

    def _check_counts(self, reached: Collection[RowParameter]) -> set[str] | None:
        """The layers whose steps will have been counted; ModelError where layers that share rows, which count them
        together, would differ in that: torch counts those of each weight that has a gradient."""
        if not self._sharing or self._loop.trainers > 1:
            return None
        parameters = self._parameters.values()
        having = {each.layer for each in reached} | {each.layer for each in parameters if each.leftover is not None}
        before = having if self._counted is None else self._counted
        for several in self._sharing:
            here, rows = [each.layer for each in several if each.layer in having], several[0].rows
            uneven = [each.layer for each in several if each.layer in before and each.layer not in having]
            uneven += [layer for layer in here if layer not in before and rows.updates]
            if here and uneven and counts_steps(rows):
                raise ModelError(
                    f"layers {', '.join(repr(each.layer) for each in several)} look up the same ids and share rows, "
                    f"of which {', '.join(map(repr, here))} has a gradient now: {kind_of(self._owner).__name__} counts "
                    f"the steps of each weight, and {uneven[0]!r} would differ from plain PyTorch. Map each layer to "
                    "features of its own, which may be in the batch twice under two names, or give "
                    "rows=bagpipe.optim..., which counts the steps of all together"
                )
        return before | having or None

    def given_rows(self, group: Mapping[str, Any]) -> optim.RowOptimizer | None:
        """What `rows=` says of those that this group is for; None: it is for others."""
        of_rows = (each.rows for each in group["params"] if isinstance(each, RowParameter))
        return next(of_rows, None) if self._rows_given else None

    def _follow_rate(self, group: dict[str, Any], rows: optim.RowOptimizer) -> None:
        """Let rows that were given have the rate of their group, unless they have a schedule of their own."""
        if not callable(rows.lr):
            if rows.lr != self._rates[id(rows)]:
                raise ConfigError(
                    f"the learning rate of the rows of {group['params'][0].layer!r} is set to {rows.lr} in `rows`, but "
                    "their param group decides: set optimizer.param_groups[-1]['lr'], or that of the group they are in"
                )
            rows.lr = self._rates[id(rows)] = float(group["lr"])
        elif float(group["lr"]) != self._rates[id(rows)]:
            raise ConfigError(
                f"the learning rate of the rows of {group['params'][0].layer!r} follows a schedule, and its param "
                "group was set to another: give rows a number, or leave the group alone"
            )
        else:
            group["lr"] = self._rates[id(rows)] = _rate(rows)

    def _follow(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: RowParameter) -> None:
        """Let rows be updated by what their group says now: schedulers and users may have changed it."""
        rows = parameter.rows
        now = tuple(
            float(value) if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
        )
        if self._settings.get(parameter.layer) != now:
            fresh = translate(optimizer, group, parameter.layer)
            for name in ("lr", *fresh.settings):
                setattr(rows, name, getattr(fresh, name))
            self._settings[parameter.layer] = now

    def _problem(self, optimizer: PreparedOptimizer, *, rows_follow: bool = False) -> str | None:
        """What is wrong with gradients of dense parameters; those of all optimizers are looked at by the first, also
        those of rows that another one will update. A GradScaler judges each by itself, as in plain PyTorch."""
        batch, others = self._judged
        if batch == self._batch and id(optimizer) in others:
            others.remove(id(optimizer))
            return self._not_finite(optimizer)
        problem = self._not_finite(optimizer)
        if problem is not None or len(self._optimizers) == 1:
            return problem
        several = [each for each in self._optimizers if each is not optimizer]
        problem = next(filter(None, map(self._not_finite, several)), None)
        try:
            if rows_follow:
                self._loop.check_gradients()
        except GradientError as error:
            problem = str(error)
        if problem is not None and _is_scaled():
            return None
        if problem is None:
            self._judged = self._batch, set(map(id, several))
        return problem

    def _not_finite(self, optimizer: torch.optim.Optimizer) -> str | None:
        """What is wrong with the gradients of its dense parameters."""
        loop = self._loop
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not isinstance(parameter, RowParameter) and not _is_finite(parameter.grad):
                    where = f"iteration {loop.done}: " if loop.is_training and not loop.is_stepped else ""
                    return (
                        f"{where}the gradient of a dense parameter of shape {tuple(parameter.shape)} is not "
                        "finite; neither dense parameters nor rows were updated: lower the learning rate, clip "
                        "gradients, or use a torch.amp.GradScaler, which skips such batches"
                    )
        return None

    def _step_dense(
        self, optimizer: PreparedOptimizer, reached: Collection[RowParameter], counted: set[str] | None
    ) -> None:
        """The step of the optimizer as its author wrote it, which sees no row.

        It would count the step of a weight whose gradient was zeroed in place, and not reached since, too.
        """
        moved = {id(parameter.rows) for parameter in reached}
        for parameter in [] if self._rows_given or self._loop.trainers > 1 else self.parameters_of(optimizer):
            if parameter.leftover is not None and id(parameter.rows) not in moved:
                moved.add(id(parameter.rows))
                parameter.rows.advance()
        with optimizer.dense_alone(), torch.no_grad():
            optimizer.dense_step()
        self._counted = counted
        self._leave_over(reached)

    # Gradients of rows

    def _layer(self, parameter: RowParameter) -> CachedLayer:
        return self._layers[parameter.layer]

    def _reached(self) -> list[RowParameter]:
        """The weights that a backward pass has reached in this iteration."""
        if not self._loop.is_training:
            return []
        layers = [(parameter, self._layer(parameter)) for parameter in self._parameters.values()]
        return [each for each, layer in layers if self._loop.is_reached(layer.table, layer.column)]

    def _leave_over(self, parameters: Iterable[RowParameter]) -> None:
        for parameter in parameters:
            parameter.leave_over()

    def row_gradient(self, parameter: RowParameter) -> Tensor | None:
        """The gradient of each row of the batch."""
        layer, loop = self._layer(parameter), self._loop
        if not loop.is_training or not loop.is_reached(layer.table, layer.column):
            return None
        if loop.trainers > 1:
            return Unshared.of(parameter)
        return loop.row_gradients()[layer.table][:, layer.column : layer.column + layer.embedding_dim]

    def drop_row_gradient(self, parameter: RowParameter) -> None:
        """Forget it."""
        layer = self._layer(parameter)
        if self._loop.is_training:
            self._loop.drop_gradients(layer.table, layer.column)

    # The state of rows, as torch's optimizer would have it

    def state_of(self, parameter: RowParameter) -> dict[str, Any]:
        """Of all rows."""
        steps = self.steps_of(parameter)
        if not steps and type(parameter.rows) is optim.Adagrad:
            first = torch.tensor(parameter.rows.initial_accumulator_value)
            return {"step": torch.tensor(0.0), "sum": first.expand(parameter.shape)}
        if not steps:
            return {}
        self.flush()
        parts: dict[str, list[Tensor]] = {}
        for ids, columns in self._state_blocks(parameter):
            rows = self._loop.read_rows(self._layer(parameter).table, ids)
            for name, part in columns.items():
                parts.setdefault(name, []).append(torch.from_numpy(rows[:, part].copy()))
        step: dict[str, Any] = {"step": torch.tensor(float(steps)) if type(parameter.rows) is optim.Adagrad else steps}
        return ({} if type(parameter.rows) is optim.SGD else step) | {
            name: torch.cat(part) for name, part in parts.items()
        }

    def check_states(self, states: Iterable[tuple[RowParameter, Mapping[str, Any]]]) -> None:
        """ModelError if these can't be the states of rows."""
        self._refuse_iterating("optimizer.load_state_dict()")
        of_rows = list(states)
        for parameter, state in of_rows:
            names = self._state_columns(parameter)
            missing = [name for name in names if name not in state]
            if missing:
                raise ModelError(
                    f"the saved state of layer {parameter.layer!r} has {', '.join(map(repr, state)) or 'nothing'}, and "
                    f"{', '.join(map(repr, missing))} is missing: load that of a {type(parameter.rows).__name__}"
                )
            for name, columns in names.items():
                wanted = (parameter.shape[0], columns.stop - columns.start)
                if tuple(state[name].shape) != wanted:
                    raise ModelError(
                        f"{name!r} of layer {parameter.layer!r} has shape {tuple(state[name].shape)} in the saved "
                        f"state, and {wanted} here: load that of the same model"
                    )
        for several in self._sharing:
            found = {each.layer: int(state.get("step", 0)) for each, state in of_rows}
            steps = {each.layer: found[each.layer] for each in several if found.get(each.layer)}
            if counts_steps(several[0].rows) and len(set(steps.values())) > 1:
                raise ModelError(
                    f"layers {', '.join(map(repr, steps))} share rows, and the saved state has "
                    f"{', '.join(map(str, steps.values()))} steps of them: map each layer to features of its own"
                )

    def load_state_of(self, parameter: RowParameter, state: Mapping[str, Any]) -> None:
        """Set that of all rows."""
        if not parameter.rows.updates and _is_first(parameter.rows, state):
            return  # as they are, however many
        table = self._layer(parameter).table
        for ids, columns in self._state_blocks(parameter):
            rows = self._loop.read_rows(table, ids)
            for name, part in columns.items():
                rows[:, part] = state[name][ids[0] : ids[-1] + 1].detach().to("cpu", torch.float32).numpy()
            self._loop.write_rows(table, ids, rows)
        parameter.rows.resume(int(state.get("step", 0)))

    def count_loaded(self, states: Iterable[tuple[RowParameter, Mapping[str, Any]]]) -> None:
        """Go on from the steps that these were counted."""
        steps = {parameter.layer: int(state.get("step", 0)) for parameter, state in states}
        for several in self._sharing:
            several[0].rows.resume(max(steps.get(each.layer, 0) for each in several))
        self._counted = {layer for layer, number in steps.items() if number} or None

    def steps_of(self, parameter: RowParameter) -> int:
        """How many torch would have counted."""
        shares = any(parameter is each for several in self._sharing for each in several)
        idle = shares and self._counted is not None and parameter.layer not in self._counted
        return 0 if idle else parameter.rows.updates

    def _state_columns(self, parameter: RowParameter) -> dict[str, slice]:
        """Where in a row each part of the state is."""
        layer = self._layer(parameter)
        layout = self._loop.layouts[layer.table]
        names = STATE_NAMES.get(type(parameter.rows))
        if names is None:  # of rows=: all that is kept of a row, also for layers that share it
            return {"rows": slice(layout.dim, layout.width)} if layout.width > layout.dim else {}
        starts = {name: (number + 1) * layout.dim + layer.column for number, name in enumerate(names)}
        return {name: slice(start, start + layer.embedding_dim) for name, start in starts.items()}

    def _state_blocks(self, parameter: RowParameter) -> Iterator[tuple[Int64s, dict[str, slice]]]:
        columns, num_rows = self._state_columns(parameter), parameter.shape[0]
        num_bytes = num_rows * 4 * sum(part.stop - part.start for part in columns.values())
        if num_bytes > WEIGHT_BYTES_MAX:
            raise ModelError(
                f"the optimizer has {num_bytes / 1e9:.1f} GB of state for layer {parameter.layer!r}, too many for a "
                f"state_dict (at most {WEIGHT_BYTES_MAX / 1e9:.0f} GB)"
            )
        for start in range(0, num_rows, ROWS_PER_BLOCK) if columns else ():
            yield np.arange(start, min(start + ROWS_PER_BLOCK, num_rows), dtype=np.int64), columns

    def _refuse_iterating(self, what: str) -> None:
        if self._loop.is_under_way:
            raise ModelError(f"{what} amid an epoch, with rows in the cache: call it before the loop, or after it")


_END = object()


class _Untold:
    """Between layers and the rows while nobody was told of an error: whoever reads rows next is."""

    def __init__(self, loader: PreparedLoader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        loader = self._loader
        loader._loop.lookups.reader = loader._loop
        loader._raise_error()
        return getattr(loader._loop, name)


class DenseState:
    """The state of a prepared optimizer without that of rows, which are saved by themselves."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = cast("PreparedOptimizer", optimizer)
        self.kind = self._optimizer.kind.__name__

    def state_dict(self) -> Tree:
        """Of dense parameters, and all settings."""
        return self._optimizer.dense_state()

    def load_state_dict(self, state: Tree) -> None:
        """Go on from it."""
        self._optimizer.load_dense_state(state)


class Unshared(Tensor):
    """Stands for the gradients of rows before trainers have shared them: to be zeroed or unscaled, and nothing else."""

    parameter: RowParameter

    @staticmethod
    def of(parameter: RowParameter) -> Unshared:
        """Those of this weight."""
        made = torch.empty(0, parameter.shape[1]).as_subclass(Unshared)
        made.parameter = parameter
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name in ("zero_", "_foreach_zero_"):
            for each in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
                each.parameter.grad = None
            return args[0]
        if name == "_amp_foreach_non_finite_check_and_unscale_":  # of a GradScaler
            grads, *rest = args
            stand_ins = [each for each in grads if isinstance(each, Unshared)]
            shared = cast("PreparedLoader", stand_ins[0].parameter.owner).loop.judged_gradients()
            return func([*(each for each in grads if not isinstance(each, Unshared)), *shared], *rest)
        if name in ("__get__", "__set__", "detach_", "requires_grad_", "__hash__"):
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        raise ModelError(
            f"{name} of the gradient of rows with several trainers, which share it when they step: clip by "
            "bagpipe.clip_grad_norm_(model.parameters(), loader, max_norm)"
        )


def _sharing(parameters: Iterable[RowParameter]) -> list[list[RowParameter]]:
    """Those of one table each, where they are several."""
    of_rows: dict[int, list[RowParameter]] = {}
    for parameter in parameters:
        of_rows.setdefault(id(parameter.rows), []).append(parameter)
    return [several for several in of_rows.values() if len(several) > 1]


def _is_finite(grad: Tensor | None) -> bool:
    if grad is None:
        return True
    values = grad._values() if grad.is_sparse else grad
    # A sum is many times as fast; it may overflow where no number does.
    return cmath.isfinite(values.sum().item()) or bool(values.isfinite().all())


def _is_scaled() -> bool:
    """Whether this step was called by a GradScaler."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_globals.get("__name__") == GradScaler.__module__:
            return True
    return False


def _is_first(rows: optim.RowOptimizer, state: Mapping[str, Any]) -> bool:
    """Whether this is what Adagrad begins with, as `PreparedLoader.state_of` writes it."""
    if type(rows) is not optim.Adagrad or int(state["step"]) or any(state["sum"].stride()):
        return False
    first = np.float32(rows.initial_accumulator_value)
    return not state["sum"].numel() or bool(state["sum"].flatten()[0].item() == first)


def _rate(rows: optim.RowOptimizer) -> float:
    return float(rows.lr(rows.updates)) if callable(rows.lr) else rows.lr


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    loader: PreparedLoader,
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their Euclidean norm is at most `max_norm`; returns the norm as it was.

    What `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` does for a model whose embedding weights are
    parameters, also with several trainers, whose gradients of rows are shared first. Call it between
    `loss.backward()` and `optimizer.step()`.
    """
    if not max_norm >= 0:
        raise ConfigError(f"max_norm is {max_norm!r}: give a number of at least 0")
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    dense = [parameter.grad for parameter in given if not isinstance(parameter, RowParameter)]
    grads = [grad for grad in dense if grad is not None]
    squares = sum(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2 for grad in grads)
    norm = math.sqrt(squares + loader.loop.grad_norm() ** 2)
    if error_if_nonfinite and not math.isfinite(norm):
        raise GradientError(f"the norm of all gradients is {norm}: lower the learning rate, or skip this batch")
    factor = max_norm / (norm + CLIP_EPSILON)
    if not factor >= 1.0:  # not finite: gradients become so too, and the steps can tell
        for grad in grads:
            grad.mul_(factor)
        loader.loop.scale_gradients(factor)
    return torch.tensor(norm)
