"""Plain PyTorch weights, of safetensors or torch.save, under the names of PyTorch or of TorchRec: into a model or rows.

Nothing is unpickled: of torch.save's files only tensors in dicts are read, by PyTorch's own restricted reader (I8).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.failures import failing
from bagpipe.checkpoint.manifest import Facts
from bagpipe.checkpoint.reading import Checkpoint
from bagpipe.checkpoint.shards import write_rows
from bagpipe.embedding import CachedLayer
from bagpipe.errors import CheckpointError
from bagpipe.layout import RowLayout
from bagpipe.store.base import Floats, Int64s

_WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name."""
_NESTED = ("state_dict", "model_state_dict", "model")
"""Where programs put the weights beside other things."""
_TORCH_STARTS = (b"PK", b"\x80\x02")
"""Of files of torch.save: zip files, and before release 1.6 pickles."""
_TORCHREC = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight\Z")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name: safetensors, or what torch.save has written (.pt, .pth, .bin)."""
    path = Path(path)
    with failing("reading", path), path.open("rb") as file:
        start = file.read(2)
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a safetensors file ({error}): check what wrote it") from error
    if start not in _TORCH_STARTS:
        raise CheckpointError(f"{path} is not a file of torch.save: check what wrote it")
    found = _load(path)
    while isinstance(found, Mapping) and not all(isinstance(value, Tensor) for value in found.values()):
        inner = next((found[name] for name in _NESTED if isinstance(found.get(name), Mapping)), None)
        if inner is None:
            break
        found = inner
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        names = found.items() if isinstance(found, Mapping) else ()
        other = [name for name, value in names if not isinstance(value, Tensor)]
        what = f"{other[:3]} beside tensors" if other else f"a {type(found).__name__}"
        raise CheckpointError(f"{path} holds {what}: save model.state_dict() alone")
    return {str(name): value for name, value in found.items()}


def load_weights(model: nn.Module, path: str | Path, *, strict: bool = True) -> list[str]:
    """Set the weights of a model, plain or accelerated, to those in a file; names of the tensors that were set.

    Names may be those of TorchRec. With `strict` the file must have all that the model has, and nothing else.
    """
    cached = {name: part for name, part in model.named_modules() if isinstance(part, CachedLayer)}
    layers = {f"{name}.weight": layer.lookups.layouts[layer.table].table.name for name, layer in cached.items()}
    for name, part in model.named_modules():
        if isinstance(part, nn.EmbeddingBag | nn.Embedding):
            layers[f"{name}.weight"] = name.rpartition(".")[2]
    wanted = _names(model, cached)
    weights = read_weights(path)
    names = match_names(weights, wanted, layers)
    if strict:
        _check_complete(Path(path), weights, wanted, names)
    state = {name: weights[there] for name, there in names.items()}
    _check_fits(Path(path), model, cached, state)
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys, result
    return list(state)


def import_checkpoint(
    path: str | Path, checkpoints: Checkpoints, layouts: Sequence[RowLayout], facts: Facts
) -> Checkpoint:
    """Write the embedding weights of a file as rows with new optimizer state: a checkpoint after 0 iterations.

    `facts` says which layer each vector of a row belongs to. Dense parameters are not part of it: see `load_weights`.
    """
    weights = read_weights(path)
    layers = {f"{layer}.weight": table.name for table in facts.tables for layer in table.layers}
    names = match_names(weights, layers, layers)
    if missing := [name for name in layers if name not in names]:
        raise CheckpointError(f"{path} has no weight for {missing}: it has {sorted(weights)[:20]}")
    rows = _PlainRows(path, layouts, facts, {name: weights[there] for name, there in names.items()})
    with checkpoints.begin(0, full=True) as pending:
        tables = [(table.name, table.width) for table in facts.tables]
        compress = checkpoints.compress
        pending.add(write_rows(checkpoints.disk, pending.directory, rows, tables, compress=compress))
        return pending.commit(facts)


def match_names(there: Iterable[str], wanted: Iterable[str], layers: Mapping[str, str]) -> dict[str, str]:
    """Which name of a file is meant by each wanted one, as far as there is one.

    The same name, but for what wraps a model; then for the weights of layers TorchRec's name of their table.
    """
    plain = {_unwrapped(name): name for name in there}
    tables: dict[str, list[str]] = {}
    for name in plain:
        if found := _TORCHREC.search(name):
            tables.setdefault(found["table"], []).append(plain[name])
    names = {}
    for name in wanted:
        if name in plain:
            names[name] = plain[name]
            continue
        stem = name.removesuffix(".weight").rpartition(".")[2]
        alike = next((tables[table] for table in (layers.get(name), stem) if name in layers and table in tables), [])
        if len(alike) > 1:
            raise CheckpointError(f"{name} could be any of {alike}: rename all but one of them in the file")
        if alike:
            names[name] = alike[0]
    return names


class _PlainRows:
    """Rows whose vectors are plain weights and whose optimizer state is new."""

    def __init__(
        self, path: str | Path, layouts: Sequence[RowLayout], facts: Facts, weights: Mapping[str, Tensor]
    ) -> None:
        self._layouts = layouts
        self._weights: list[list[Tensor]] = []
        for layout, table in zip(layouts, facts.tables, strict=True):
            parts = [weights[f"{layer}.weight"] for layer in table.layers]
            for layer, weight, dim in zip(table.layers, parts, layout.dims, strict=True):
                if tuple(weight.shape) != (layout.table.rows, dim):
                    raise CheckpointError(
                        f"{layer}.weight has shape {tuple(weight.shape)} in {path}, and table {table.name!r} "
                        f"{(layout.table.rows, dim)}: use the weights of the same model"
                    )
            self._weights.append(parts)

    def iterate(self, table: int, since: int | None, rows_per_chunk: int) -> Iterator[tuple[Int64s, Floats]]:
        """Ids and values of all rows."""
        assert since is None, since
        layout, weights = self._layouts[table], self._weights[table]
        for start in range(0, len(weights[0]), rows_per_chunk):
            ids = np.arange(start, min(start + rows_per_chunk, len(weights[0])), dtype=np.int64)
            values = np.empty((len(ids), layout.width), np.float32)
            values[:, layout.dim :] = layout.optimizer.initial_state(layout.dims)
            for weight, column in zip(weights, layout.columns, strict=True):
                block = weight[start : start + len(ids)].to(torch.float32).numpy()
                values[:, column : column + block.shape[1]] = block
            yield ids, values


def _load(path: Path) -> Any:
    refused = (
        f"{path} holds more than tensors in dicts, which is not read because it could run code: save "
        "model.state_dict() alone, or as safetensors"
    )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(refused) from error
    except (RuntimeError, ValueError, EOFError, OSError):  # torch.save before 1.6 wrote files that can't be mapped
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(refused) from error
        except (RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
            raise CheckpointError(f"{path} is not a file of torch.save ({error}): check what wrote it") from error


def _names(model: nn.Module, cached: Mapping[str, CachedLayer]) -> list[str]:
    """Of all that a model's state_dict has, without its contents."""
    try:
        for layer in cached.values():
            layer.placeholders = True
        return list(model.state_dict())
    finally:
        for layer in cached.values():
            layer.placeholders = False


def _check_complete(path: Path, there: Iterable[str], wanted: Iterable[str], names: Mapping[str, str]) -> None:
    missing = [name for name in wanted if name not in names]
    unused = sorted(set(there) - set(names.values()))
    if missing or unused:
        raise CheckpointError(
            f"{path} has no weights for {missing or 'nothing'} of the model, and {unused or 'nothing'} that the model "
            "has not: rename them, or load what fits with strict=False"
        )


def _check_fits(path: Path, model: nn.Module, cached: Mapping[str, CachedLayer], there: Mapping[str, Tensor]) -> None:
    """Before anything is set: each has a place in the model, of its shape."""
    here = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {name: tuple(value.shape) for name, value in here.items()}
    shapes |= {f"{name}.weight": (layer.num_embeddings, layer.embedding_dim) for name, layer in cached.items()}
    for name, value in there.items():
        if name in here and here[name].is_meta:
            raise CheckpointError(
                f"{name} is on the meta device, where nothing can be set: load {path} in the block of accelerate"
            )
        if name in shapes and tuple(value.shape) != shapes[name]:
            raise CheckpointError(
                f"{name} has shape {tuple(value.shape)} in {path}, and {shapes[name]} in the model: use the weights of "
                "the same model"
            )


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        while name.startswith(wrapper):
            name = name.removeprefix(wrapper)
    return name
