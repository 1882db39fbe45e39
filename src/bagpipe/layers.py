"""Which embedding layer looks up which feature, and which of them share a row.

`bind` reads a model and the names of a batch's features and decides, once and before any training, how rows are laid
out; whatever can't be trained exactly it refuses by name (I8). It changes nothing in the model: `swap` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from bagpipe.errors import BatchError, ModelError
from bagpipe.types import Table

EmbeddingLayer = nn.EmbeddingBag | nn.Embedding
FeatureMap = Mapping[str, str | Sequence[str]]
NOISE = {"bag", "bags", "emb", "embed", "embedding", "embeddings", "embs", "id", "ids", "lookup", "table", "tables"}


_INTEGERS = "ids are integers; convert them, such as by torch.as_tensor(ids).long()"


class Replacement(nn.Module):
    """What stands in the place of an embedding layer; it keeps the layer, but not as a part of the model."""

    def __init__(self, replaced: EmbeddingLayer) -> None:
        super().__init__()
        self._replaced = (replaced,)

    @property
    def replaced(self) -> EmbeddingLayer:
        """The layer as it was."""
        return self._replaced[0]


@dataclass(frozen=True, slots=True)
class Retired:
    """The forward of a layer that was swapped out: whoever still holds it would train a copy that nobody reads.

    An object and not a closure, so that copies and pickles of the layer refuse too.
    """

    name: str

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse."""
        raise ModelError(
            f"layer {self.name!r} is no longer part of the model, bagpipe.prepare has put another in its place: "
            f"use the model's own {self.name!r} and not a reference kept in a list, a dict or a closure, or register "
            "such layers in an nn.ModuleList or nn.ModuleDict before bagpipe.prepare"
        )


@dataclass(frozen=True, slots=True)
class RetiredWeight:
    """A hook on the weight of a layer that was swapped out: gradients that reach it would train nothing."""

    name: str

    def __call__(self, _: Tensor) -> NoReturn:
        """Refuse."""
        raise ModelError(
            f"a gradient reaches the weight that layer {self.name!r} had before bagpipe.prepare, where nobody uses "
            "it: its rows are in bagpipe's store. A penalty over weights that the model keeps in a list, as an L2 "
            "regularisation may, is such a use: switch it off, and give rows bagpipe.optim.AdamW(weight_decay=...) or "
            f"add a penalty of the vectors that {self.name!r} looks up to the loss"
        )


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """An embedding layer of a model and where its vectors lie."""

    name: str
    """Its qualified name in the model."""
    module: EmbeddingLayer
    table: int
    """The table whose rows it looks up."""
    part: int
    """Which of the vectors of a row is its own."""


@dataclass(frozen=True, slots=True)
class Binding:
    """How the embedding layers of a model map to tables."""

    tables: tuple[Table, ...]
    layers: tuple[BoundLayer, ...]

    def dims(self, table: int) -> tuple[int, ...]:
        """Lengths of the vectors in a row of the table."""
        return tuple(layer.module.embedding_dim for layer in self.layers if layer.table == table)

    def frozen(self, table: int) -> bool:
        """Whether the rows of the table are only read."""
        return not any(layer.module.weight.requires_grad for layer in self.layers if layer.table == table)


def bind(
    model: nn.Module,
    features: Collection[str],
    mapping: FeatureMap | None = None,
    tables: Sequence[Table] = (),
    keep: Collection[str] = (),
    *,
    unusable: Mapping[str, str] = MappingProxyType({}),
) -> Binding:
    """Map the embedding layers of a model to the features of its batches.

    `mapping` names for each feature the layer or layers that look it up; without it they are guessed from their names
    and those of `tables`, the tables of the data. Layers named in `keep` stay as they are. Layers that are fed by the
    same features share a table, so that one cached row serves them all. `unusable` says what the parts of a batch are
    that hold no ids, for messages.
    """
    everything = embedding_layers(model)
    if isinstance(keep, str):
        raise ModelError(f"keep is the text {keep!r}: give a list of layers, such as [{keep!r}]")
    unknown = [name for name in keep if name not in everything]
    if unknown:
        raise ModelError(f"keep names {_list(unknown)}; the model's layers are {_list(everything)}")
    found = {name: layer for name, layer in everything.items() if name not in keep}
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no nn.EmbeddingBag or nn.Embedding layer to prepare: keep layers as "
            "attributes or in an nn.ModuleList, not in a plain list; a model without any, train as it is"
        )
    for name, layer in found.items():
        _refuse_inexact(name, layer)
        _refuse_retired(name, layer, model.get_submodule(name))
    _refuse_shared(model, found)
    names_of = _names_of(model, found)
    if mapping is not None:
        fed = _given(names_of, features, mapping, unusable)
    else:
        fed = _guess(names_of, features, tables, unusable)
    known = {name: table for table in tables for name in table.features}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in found:
        groups.setdefault(tuple(fed[name]), []).append(name)
    _refuse_overlap(groups)
    bound: list[BoundLayer] = []
    result: list[Table] = []
    for number, (names, layers) in enumerate(groups.items()):
        sizes = {found[layer].num_embeddings for layer in layers}
        if len(sizes) > 1:
            raise ModelError(
                f"layers {_list(layers)} look up the same ids but have {sorted(sizes)} rows: make them equal"
            )
        if len({found[layer].weight.requires_grad for layer in layers}) > 1:
            raise ModelError(f"layers {_list(layers)} share their rows, but only some are frozen: freeze all or none")
        result.append(_table(names, layers[0], found[layers[0]], known, {table.name for table in result}))
        bound += [BoundLayer(layer, found[layer], number, part) for part, layer in enumerate(layers)]
    return Binding(tuple(result), tuple(bound))


def embedding_layers(model: nn.Module) -> dict[str, EmbeddingLayer]:
    """The embedding layers of a model, replaced or not, by qualified name, in the order of the model."""
    layers = {}
    for name, part in model.named_modules():
        layer = part.replaced if isinstance(part, Replacement) else part
        if isinstance(layer, nn.EmbeddingBag | nn.Embedding):
            layers[name] = layer
    return layers


def swap(model: nn.Module, name: str, replacement: nn.Module) -> None:
    """Put another module in the place of the one with this qualified name, wherever the model uses it.

    The old one refuses to be called from now on.
    """
    replaced = model.get_submodule(name)
    for owner in list(model.modules()):
        for key, part in owner._modules.items():
            if part is replaced:
                owner._modules[key] = replacement
    vars(replaced)["forward"] = Retired(name)


def retire_weight(layer: BoundLayer) -> Callable[[], None]:
    """Refuse gradients for the weight of a layer that is swapped out; returns what allows them again.

    Neither of them holds the weight.
    """
    if not layer.module.weight.requires_grad:
        return lambda: None
    hook = layer.module.weight.register_hook(RetiredWeight(layer.name))  # type: ignore[no-untyped-call]
    return hook.remove  # type: ignore[no-any-return]


def _refuse_inexact(name: str, layer: EmbeddingLayer) -> None:
    kind = nn.EmbeddingBag if isinstance(layer, nn.EmbeddingBag) else nn.Embedding
    if not name:
        raise ModelError(f"the model is itself an nn.{kind.__name__}: put it into an nn.Sequential")
    if type(layer).forward is not kind.forward or not isinstance(vars(layer).get("forward"), Retired | None):
        raise ModelError(
            f"layer {name!r} is a {type(layer).__name__} with a forward of its own: make it a module that has an "
            f"nn.{kind.__name__}, or name it in bagpipe.Options(keep=...)"
        )
    if layer.max_norm is not None:
        raise ModelError(
            f"layer {name!r} has max_norm={layer.max_norm}, which changes rows while they are read: unset it"
        )
    if layer.scale_grad_by_freq:
        raise ModelError(f"layer {name!r} has scale_grad_by_freq=True, which bagpipe does not compute: unset it")
    if isinstance(layer, nn.EmbeddingBag) and layer.mode == "max":
        raise ModelError(f"layer {name!r} pools with mode='max': use 'sum' or 'mean'")
    if layer.weight.dtype != torch.float32:
        raise ModelError(f"layer {name!r} has {layer.weight.dtype} weights: rows are float32, convert it")
    hooked: Any = layer
    hooks = [hooked._forward_hooks, hooked._forward_pre_hooks, hooked._backward_hooks, hooked._backward_pre_hooks]
    hooks += [hooked._state_dict_hooks, hooked._state_dict_pre_hooks]
    hooks += [hooked._load_state_dict_pre_hooks, hooked._load_state_dict_post_hooks]
    of_weight = (hooked.weight._backward_hooks or {}).values()
    hooks += [[hook for hook in of_weight if not isinstance(hook, RetiredWeight)]]
    hooks += [hooked.weight._post_accumulate_grad_hooks]
    if is_parametrized(layer) or any(hooks):
        raise ModelError(
            f"layer {name!r} has hooks or parametrizations, which would be lost: remove them, or name it in "
            "bagpipe.Options(keep=...)"
        )


def _refuse_retired(name: str, layer: EmbeddingLayer, part: nn.Module) -> None:
    """A layer that is swapped out here, in this model, is behind its replacement; any other was in another model."""
    retired = vars(layer).get("forward")
    if part is layer and isinstance(retired, Retired):
        raise ModelError(
            f"layer {name!r} was {retired.name!r} of another model, where bagpipe.prepare has put another in its "
            "place: put both models into one nn.Module and prepare that, or give this one a layer of its own"
        )


def _refuse_shared(model: nn.Module, layers: Mapping[str, EmbeddingLayer]) -> None:
    owners = {id(layer.weight): name for name, layer in layers.items()}
    for name, part in model.named_modules():
        for key, parameter in part._parameters.items():
            owner = owners.get(id(parameter), name)
            if owner != name:
                raise ModelError(
                    f"layer {owner!r} and {name + '.' + key!r} share one weight: use one layer for both features, or "
                    "name it in bagpipe.Options(keep=...)"
                )


def _names_of(model: nn.Module, layers: Mapping[str, EmbeddingLayer]) -> dict[str, list[str]]:
    """All names under which a model has each layer; most have one."""
    names: dict[str, list[str]] = {name: [] for name in layers}
    first = {id(model.get_submodule(name)): name for name in layers}
    for name, part in model.named_modules(remove_duplicate=False):
        if id(part) in first:
            names[first[id(part)]].append(name)
    return names


def _table(
    features: tuple[str, ...], name: str, layer: EmbeddingLayer, known: Mapping[str, Table], taken: Collection[str]
) -> Table:
    """The table of these features: that of the data where it is known, else one named after the layer."""
    of_data = {known[feature].name: known[feature] for feature in features if feature in known}
    if len(of_data) != 1 or features[0] not in known:
        return Table(name, layer.num_embeddings, features)
    table = known[features[0]]
    rows = table.rows
    if rows is None and not layer.weight.is_meta:
        rows = layer.num_embeddings
    if rows is not None and rows > layer.num_embeddings:
        raise ModelError(
            f"table {table.name!r} has {rows} rows and layer {name!r} {layer.num_embeddings}: make the layer as large"
        )
    return Table(name if table.name in taken else table.name, rows, features)


def _given(
    layers: Mapping[str, Sequence[str]], features: Collection[str], mapping: FeatureMap, unusable: Mapping[str, str]
) -> dict[str, list[str]]:
    fed: dict[str, list[str]] = {name: [] for name in layers}
    first = {alias: name for name, aliases in layers.items() for alias in aliases}
    for feature, targets in mapping.items():
        if feature not in features and feature in unusable:
            raise BatchError(f"feature {feature!r} is {unusable[feature]}: {_INTEGERS}")
        if feature not in features:
            raise ModelError(f"the mapping names feature {feature!r}; the batches have {_list(features)}")
        for target in [targets] if isinstance(targets, str) else targets:
            if target not in first:
                raise ModelError(f"feature {feature!r} is mapped to {target!r}; the model's layers are {_list(first)}")
            fed[first[target]].append(feature)
    idle = [name for name, names in fed.items() if not names]
    if idle:
        raise ModelError(
            f"no feature is mapped to {_list(idle)}: add it to the mapping, or name it in bagpipe.Options(keep=...)"
        )
    return fed


def _guess(
    layers: Mapping[str, Sequence[str]],
    features: Collection[str],
    tables: Sequence[Table],
    unusable: Mapping[str, str],
) -> dict[str, list[str]]:
    if len(layers) == 1 and len(features) == 1:
        return {name: list(features) for name in layers}
    aliases = {feature: {_stem(feature), _stem(feature.rpartition(".")[2])} for feature in features}
    for table in tables:
        for feature in table.features:
            if feature in aliases:
                aliases[feature] = {_stem(table.name)}
    fed = {}
    for name, names in layers.items():
        stems = {_stem(part) for each in names for part in (each, each.rpartition(".")[2])} - {()}
        fed[name] = [feature for feature in features if stems & aliases[feature]]
        alike = [part for part in unusable if stems & {_stem(part), _stem(part.rpartition(".")[2])}]
        if not fed[name] and alike:
            raise BatchError(f"{alike[0]!r} could feed layer {name!r}, but is {unusable[alike[0]]}: {_INTEGERS}")
        if not fed[name]:
            raise ModelError(
                f"can't tell which feature feeds layer {name!r}; the batches have {_list(features)}: "
                f"give features={{'a feature': {name!r}, ...}}"
            )
    return fed


def _stem(name: str) -> tuple[str, ...]:
    words = tuple(word for word in re.split(r"[^a-z0-9]+", name.lower()) if word)
    return tuple(word for word in words if word not in NOISE) or words


def _refuse_overlap(groups: Mapping[tuple[str, ...], Sequence[str]]) -> None:
    seen: dict[str, tuple[str, ...]] = {}
    for names in groups:
        for name in names:
            if name in seen:
                raise ModelError(
                    f"feature {name!r} feeds {_list(groups[seen[name]])} together with {_list(seen[name])}, and "
                    f"{_list(groups[names])} together with {_list(names)}: layers that share a feature must share all. "
                    f"Let the batch have {name!r} twice, under two names, one for each of them"
                )
            seen[name] = names


def _list(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in names)
