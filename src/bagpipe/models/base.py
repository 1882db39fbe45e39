"""What the four models share: embedding layers made from tables, their pooling into fields, and the dense layers.

Plain PyTorch: nothing here knows the engine. The dense layers of a model are made before its embedding layers, so that
their initial values do not depend on where the tables live (I1).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from bagpipe.errors import BatchError, ConfigError
from bagpipe.types import Ids, Table

Device = torch.device | str | None


class RecommendationModel(nn.Module):
    """A model of numeric features and fields: each feature of a table, pooled by itself, is one field."""

    embeddings: nn.ModuleDict
    """The embedding layer of each table, by its name."""

    def __init__(self, tables: Sequence[Table], num_dense: int, dim: int) -> None:
        super().__init__()
        _check_tables(tables)
        if num_dense < 0 or dim < 1:
            raise ConfigError(f"num_dense is {num_dense} and dim is {dim}: give at least 0 and at least 1")
        self.num_dense = num_dense
        self.dim = dim
        self.fields = tuple((table.name, feature) for table in tables for feature in table.features)

    def forward(self, dense: Tensor, sparse: Mapping[str, Ids]) -> Tensor:
        """Logits, shape (samples,)."""
        raise NotImplementedError

    def numeric(self, dense: Tensor) -> Tensor:
        """The numeric features, once their shape is the announced one."""
        if dense.dim() != 2 or dense.shape[1] != self.num_dense:
            raise BatchError(
                f"dense has shape {tuple(dense.shape)}, the model was made for (samples, {self.num_dense}): "
                "change num_dense or the data"
            )
        return dense

    def pool(self, bags: nn.ModuleDict, sparse: Mapping[str, Ids]) -> list[Tensor]:
        """The sum of each sample's vectors, one tensor of shape (samples, width of the bags) a field."""
        pooled = []
        for table, feature in self.fields:
            if feature not in sparse:
                raise BatchError(
                    f"the batch has no ids of feature {feature!r}, which the model looks up in table {table!r}; "
                    f"it has {', '.join(map(repr, sparse)) or 'none'}"
                )
            values, offsets, weights = _arguments(sparse[feature])
            pooled.append(bags[table](values, offsets, weights))
        return pooled


def embedding_bags(tables: Sequence[Table], dim: int, device: Device, width: int | None = None) -> nn.ModuleDict:
    """A sum-pooling layer for each table, by its name, of vectors of length `width`, or else the model's `dim`.

    On the meta device nothing is allocated. Elsewhere values are uniform within 1 / sqrt(dim), drawn on the CPU from
    the global generator, so that they do not depend on the device.
    """
    width = dim if width is None else width
    place = torch.get_default_device() if device is None else torch.device(device)
    on_meta = place.type == "meta"
    bags = nn.ModuleDict()
    for table in tables:
        if table.rows is None and not on_meta:
            raise ConfigError(
                f"table {table.name!r} has no fixed number of rows, so its layer can't be allocated: "
                "make the model with device='meta', or give the table its rows"
            )
        # Layers of other widths have as many rows: they look up the same ids.
        rows = unbounded_rows(dim) if table.rows is None else table.rows
        weight = torch.empty(rows, width, dtype=torch.float32, device="meta" if on_meta else "cpu")
        weight.uniform_(-(dim**-0.5), dim**-0.5)
        bags[table.name] = nn.EmbeddingBag(rows, width, mode="sum", _weight=weight.to(place))
    return bags


def unbounded_rows(dim: int) -> int:
    """Rows that stand for "any 64-bit id" in a layer on the meta device: as many float32 rows as torch can describe.

    Torch keeps the size of a tensor in bytes in 63 bits, on the meta device too, so 2**63 - 1 rows are out of reach.
    """
    return (2**63 - 1) // (torch.float32.itemsize * dim)


def mlp(inputs: int, hidden: Sequence[int], outputs: int | None = None, *, normalise: bool = False) -> nn.Sequential:
    """Fully connected layers, each with ReLU; `outputs` adds a last one without."""
    sizes = [inputs, *hidden]
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [_linear(fan_in, fan_out), *([nn.LayerNorm(fan_out)] if normalise else []), nn.ReLU()]
    if outputs is not None:
        layers.append(_linear(sizes[-1], outputs))
    return nn.Sequential(*layers)


def _linear(fan_in: int, fan_out: int) -> nn.Linear:
    """A layer that starts as DLRM's do (Glorot's normal): from torch's default, plain SGD hardly moves in an epoch."""
    layer = nn.Linear(fan_in, fan_out)
    nn.init.normal_(layer.weight, 0.0, (2 / (fan_in + fan_out)) ** 0.5)
    nn.init.normal_(layer.bias, 0.0, (1 / fan_out) ** 0.5)
    return layer


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The named parameters that are not weights of embedding layers; works before and after layers are swapped."""
    layers = (part for part in model.modules() if isinstance(part, nn.EmbeddingBag | nn.Embedding))
    rows = {id(layer.weight) for layer in layers}
    return ((name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in rows)


def count_dense(model: nn.Module) -> int:
    """How many numbers the dense parameters have."""
    return sum(parameter.numel() for _, parameter in dense_parameters(model))


def _arguments(ids: Ids) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What an embedding layer is called with; it can't take two-dimensional values without columns."""
    if ids.offsets is None and ids.values.shape[1] == 0:
        offsets = torch.zeros(len(ids), dtype=torch.int64, device=ids.values.device)
        return ids.values.flatten(), offsets, None if ids.weights is None else ids.weights.flatten()
    return ids.values, ids.offsets, ids.weights


def _check_tables(tables: Sequence[Table]) -> None:
    if not tables:
        raise ConfigError("the model has no tables: give at least one")
    for kind, names in (
        ("table", [table.name for table in tables]),
        ("feature", [feature for table in tables for feature in table.features]),
    ):
        name, count = Counter(names).most_common(1)[0]
        if count > 1:
            raise ConfigError(f"{kind} {name!r} is named {count} times: give each {kind} once")
    for table in tables:
        try:
            nn.ModuleDict({table.name: nn.Identity()})
        except KeyError as refusal:
            raise ConfigError(
                f"table {table.name!r} can't name a layer of a torch module ({refusal.args[0]}): call the table "
                f"something else and give it features={table.features}"
            ) from refusal
