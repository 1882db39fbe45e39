"""What stands for an embedding weight in a model and in a torch optimizer, and what that optimizer does to rows.

The weight itself is gone: its rows are in a store, those of the batch in a cache. A `RowParameter` keeps its place in
`model.parameters()` and in `param_groups`, so that freezing, clipping, scaling, schedulers and states work as they are.
A torch optimizer is translated into a row optimizer only where it moves no row that a batch does not name (I1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from bagpipe.errors import ConfigError, ModelError
from bagpipe.optim import SGD, Adagrad, Adam, Frozen, PerTable, RowOptimizer

MUST_BE_OFF = ("momentum", "weight_decay", "maximize", "differentiable", "capturable", "amsgrad")
TRANSLATED: dict[type[torch.optim.Optimizer], tuple[type[RowOptimizer], tuple[str, ...]]] = {
    torch.optim.SGD: (SGD, ()),
    torch.optim.Adagrad: (Adagrad, ("lr_decay", "initial_accumulator_value", "eps")),
    torch.optim.SparseAdam: (Adam, ("betas", "eps")),
}
"""The row optimizer that does to the rows of a batch what torch's does to a weight, and the settings they share."""
MEANT = {
    "Adam": "Adam(lr)",
    "AdamW": "AdamW(lr)",
    "Adamax": "Adam(lr)",
    "NAdam": "Adam(lr)",
    "RAdam": "Adam(lr)",
    "momentum": "Momentum(lr, momentum)",
    "weight_decay": "AdamW(lr, weight_decay=...)",
}
"""The row optimizer that people mean who use one of torch's that moves all rows."""


def translate(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], layer: str) -> RowOptimizer:
    """The row optimizer that does to touched rows what this group does to the whole weight of a layer.

    ConfigError if it would move other rows too, or if nobody knows what it does.
    """
    kind = kind_of(optimizer)
    wrong = next((name for name in MUST_BE_OFF if group.get(name)), None)
    what = f"{kind.__name__} with {wrong}={group[wrong]!r}" if wrong else kind.__name__
    if not kind.__module__.startswith("torch.optim"):
        raise ConfigError(
            f"the weight of layer {layer!r} is in a {what}, and what that does to rows is not known: give "
            "rows=bagpipe.optim..., or, if it wraps one of torch's, prepare that one first and wrap it afterwards"
        )
    if wrong or kind not in TRANSLATED:
        if wrong == "maximize":
            raise ConfigError(
                f"the weight of layer {layer!r} is in a {what}: rows have no such update. Give the loss the other sign "
                "instead"
            )
        reason = "rows have no such update"
        if wrong in ("momentum", "weight_decay") or wrong is None:
            reason = "it moves rows that a batch does not name"
        meant = MEANT.get(wrong or "") or MEANT.get(kind.__name__, "Adagrad(lr)")
        advice = " (of a OneCycleLR say cycle_momentum=False)" if wrong == "momentum" else ""
        raise ConfigError(
            f"the weight of layer {layer!r} is in a {what}: {reason}. Give "
            f"rows=bagpipe.optim.{meant}, which updates the rows of each "
            f"batch only, or put embedding weights into SGD, Adagrad or SparseAdam without {wrong or 'it'}{advice}"
        )
    row_kind, settings = TRANSLATED[kind]
    return row_kind(float(group["lr"]), **{name: group[name] for name in settings})


def counts_steps(rows: RowOptimizer) -> bool:
    """Whether what an update does depends on how many there were before."""
    return isinstance(rows, Adam) or (isinstance(rows, Adagrad) and rows.lr_decay != 0)


def kind_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class of an optimizer as its author wrote it, also once it is prepared."""
    return getattr(type(optimizer), "kind", type(optimizer))


class RowGradients(Protocol):
    """Where the gradients of rows are: the training loop over them."""

    def row_gradient(self, parameter: RowParameter) -> Tensor | None:
        """The gradient of each row of the current batch; None if no backward pass has reached the layer."""

    def drop_row_gradient(self, parameter: RowParameter) -> None:
        """Forget it; a backward pass may follow."""


_DESCRIPTIONS = {
    "__hash__", "__len__", "__repr__", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
    "is_floating_point", "ndimension", "nelement", "numel", "requires_grad_", "size", "storage_offset", "stride",
}  # fmt: skip
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes that give numbers; all others describe."""


class RowParameter(nn.Parameter):
    """Has the shape, type, device and `requires_grad` of an embedding weight, and in training the gradient of the
    rows of the batch; reading its values raises."""

    layer: str
    rows: RowOptimizer
    """What updates them."""
    owner: RowGradients | None
    leftover: Tensor | None
    """Stands for gradients that were used, or belong to an iteration that is over, until they are zeroed: without it
    nobody would call us; it has no rows, but counts what is done to it."""

    def __new__(cls, weight: Tensor, layer: str, device: torch.device) -> RowParameter:
        """Of a weight that may be on any device, for rows that will be on this one."""
        nothing = torch.zeros(1, dtype=weight.dtype, device=device).expand(weight.shape)
        made: RowParameter = torch.Tensor._make_subclass(cls, nothing, weight.requires_grad)
        made.layer, made.owner, made.leftover = layer, None, None
        return made

    @property
    def grad(self) -> Tensor | None:
        """The gradient of each row of the current batch."""
        found = None if self.owner is None else self.owner.row_gradient(self)
        return self.leftover if found is None else found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise ModelError(
                f"the gradient of layer {self.layer!r} is made by backward passes: change it in place, or set None"
            )
        self.leftover = None
        if self.owner is not None:
            self.owner.drop_row_gradient(self)

    def zero(self, set_to_none: bool) -> None:
        """As an optimizer does: a gradient that is zeroed in place is still there, and steps with it are counted."""
        kept = not set_to_none and self.grad is not None
        self.grad = None
        if kept:
            self.leave_over()
            assert self.leftover is not None
            self.leftover.zero_()

    @property
    def is_unzeroed(self) -> bool:
        """Whether plain PyTorch would add the next gradient to one that was there before."""
        return self.leftover is not None and not self.leftover._version

    def leave_over(self) -> None:
        """Plain PyTorch would go on having a gradient here until it is zeroed."""
        self.leftover = torch.empty(0, self.shape[1])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__"):  # of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            described = name not in _VALUES
        else:
            described = name in _DESCRIPTIONS
        if described:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        layer = next(_layers_of([args, *(kwargs or {}).values()]))
        raise ModelError(
            f"{name} of the weight of layer {layer!r}, which is not in memory: its rows are in bagpipe's store. Look "
            "ids up by calling the layer, and build optimizers before bagpipe.prepare; read the weight by "
            "model.state_dict() or bagpipe.export, and set it by model.load_state_dict(). A penalty over all weights, "
            "as an L2 regularisation, would move rows that no batch names: give rows=bagpipe.optim.AdamW(lr, "
            "weight_decay=...), or add what the layer looks up. A layer of which each batch needs all rows, as scores "
            "of all items and convolutions of a graph do, stays as it is with "
            f"options=bagpipe.Options(keep=[{layer!r}])"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RowParameter({self.layer!r}, {tuple(self.shape)})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ModelError(_NOT_COPIED.format(self.layer))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError(_NOT_COPIED.format(self.layer))


def _layers_of(arguments: Any) -> Iterator[str]:
    """The layers of all weights among the arguments of a function."""
    if isinstance(arguments, RowParameter):
        yield arguments.layer
    elif isinstance(arguments, list | tuple):
        for each in arguments:
            yield from _layers_of(each)


_NOT_COPIED = (
    "the weight of layer {!r} can't be copied or pickled, its rows are in bagpipe's store: keep model.state_dict() and "
    "optimizer.state_dict(), or write the model with bagpipe.export(model, path)"
)


class OfLayers(PerTable):
    """A row optimizer for each table, so that each counts its own updates, as torch does for each weight."""

    def __init__(self, parameters: Mapping[str, RowParameter], groups: Mapping[str, int]) -> None:
        """`groups` tells the param groups in which the weights of layers are apart; any other weight is in none."""
        super().__init__(Frozen(), {})
        self._parameters, self._groups = parameters, groups

    def for_table(self, table: str, layers: Sequence[str] = ()) -> RowOptimizer:
        """Of the layers that share the rows of a table."""
        of_layers = [self._parameters[name] for name in layers]
        if len({self._groups.get(name) for name in layers}) > 1:
            raise ConfigError(
                f"layers {list(layers)} look up the same ids and share the rows of table {table!r}, and their weights "
                "are in several param groups: put them into one"
            )
        chosen = of_layers[0].rows
        for parameter in of_layers:
            parameter.rows = chosen
        self.tables[table] = chosen
        return chosen

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; tables that are new since then begin."""
        saved = state.get("tables")
        if isinstance(saved, Mapping):
            own = {name: optimizer.state_dict() for name, optimizer in self.tables.items()}
            state = {**state, "tables": {**own, **saved}}
        super().load_state_dict(state)


def dense_parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a model by name, but for those whose values are rows."""
    return ((name, each) for name, each in model.named_parameters() if not isinstance(each, RowParameter))


STATE_NAMES: dict[type[RowOptimizer], tuple[str, ...]] = {SGD: (), Adagrad: ("sum",), Adam: ("exp_avg", "exp_avg_sq")}
"""How torch's optimizers name the state of a weight, in the order in which it lies in a row."""
