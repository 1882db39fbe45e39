"""The models of torchfm, deepctr-torch and torch-rechub: how each is built, and which batches it is trained on.

Nothing of a library is imported before a trial is made, so that the names are known where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ecosystem.training import BATCH_SIZE, NUM_BATCHES, Trial

ROWS = {"user": 150, "item": 200, "city": 60}
DIM, TAGS, LENGTH = 8, 4, 6
"""Of vectors; how many tags a sample has; how long a history is."""


@dataclass(frozen=True)
class Case:
    """A model of a library."""

    library: str
    name: str
    make: Callable[[], Trial]
    why: str = ""
    """Why it is refused, if it is."""
    error: str = ""
    """How the error begins then."""
    quick: bool = False
    """Whether `make test` has it, too."""

    @property
    def id(self) -> str:
        return f"{self.library}-{self.name}"


SCORES = "scores all items in each batch"
PENALTY = "penalises whole tables in each batch"


def whole(operation: str, layer: str) -> str:
    """The error of a model that uses all rows of a layer at once."""
    return f"ModelError: {operation} of the weight of layer {layer!r}, which is not in memory"


def ids(random: np.random.Generator, rows: int, *shape: int, first: int = 0) -> Tensor:
    """Some rows are named often."""
    return torch.from_numpy((first + random.random(shape) ** 2 * (rows - first)).astype(np.int64))


def each_batch(make: Callable[[np.random.Generator], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The same batches every time."""
    random = np.random.default_rng(0)
    return [make(random) for _ in range(NUM_BATCHES)]


def clicks(random: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy((random.random((BATCH_SIZE, *shape)) < 0.4).astype(np.float32))


# torchfm: a matrix of ids, to which the model adds where the rows of each field begin in the one table of all fields.
# So the batch names the rows beside it: features={"rows": ...}.

FIELDS = list(ROWS.values())


def torchfm_batch(random: np.random.Generator) -> dict[str, Tensor]:
    fields = torch.stack([ids(random, rows, BATCH_SIZE) for rows in FIELDS], 1)
    starts = torch.tensor([0, *accumulate(FIELDS)][:-1])
    return {"fields": fields, "rows": fields + starts, "label": clicks(random)}


def torchfm(module: str, name: str, *arguments: Any, quick: bool = False, **options: Any) -> Case:
    def make() -> Trial:
        from importlib import import_module

        kind = getattr(import_module(f"torchfm.model.{module}"), name)
        layers = embeddings(kind(FIELDS, *arguments, **options))
        return Trial(
            build=lambda: kind(FIELDS, *arguments, **options),
            batches=each_batch(torchfm_batch),
            loss=lambda model, batch: functional.binary_cross_entropy(model(batch["fields"]), batch["label"]),
            predict=lambda model, batch: model(batch["fields"]),
            features={"rows": layers},
        )

    return Case("torchfm", name.removesuffix("Model"), make, quick=quick)


def embeddings(model: nn.Module, without: Sequence[str] = ()) -> list[str]:
    """Names of its embedding layers."""
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Embedding) and name not in without]


TORCHFM = [
    torchfm("lr", "LogisticRegressionModel"),
    torchfm("fm", "FactorizationMachineModel", DIM),
    torchfm("ffm", "FieldAwareFactorizationMachineModel", DIM, quick=True),
    torchfm("fnn", "FactorizationSupportedNeuralNetworkModel", DIM, (16,), 0.2),
    torchfm("wd", "WideAndDeepModel", DIM, (16,), 0.2),
    torchfm("ncf", "NeuralCollaborativeFiltering", np.array([0]), np.array([1]), DIM, (16,), 0.2),
    torchfm("nfm", "NeuralFactorizationMachineModel", DIM, (16,), (0.2, 0.2)),
    torchfm("pnn", "ProductNeuralNetworkModel", DIM, (16,), 0.2),
    torchfm("dcn", "DeepCrossNetworkModel", DIM, 2, (16,), 0.2),
    torchfm("afm", "AttentionalFactorizationMachineModel", DIM, 8, (0.2, 0.2)),
    torchfm("dfm", "DeepFactorizationMachineModel", DIM, (16,), 0.2, quick=True),
    torchfm("fnfm", "FieldAwareNeuralFactorizationMachineModel", DIM, (16,), (0.2, 0.2)),
    torchfm("xdfm", "ExtremeDeepFactorizationMachineModel", DIM, (16,), 0.2, (8, 8)),
    torchfm("afi", "AutomaticFeatureInteractionModel", DIM, 8, 2, 2, (16,), (0.0, 0.2)),
    torchfm("afn", "AdaptiveFactorizationNetwork", DIM, 8, (16,), (0.0, 0.0)),
]

# deepctr-torch: one matrix of floats, from which the model takes its columns and makes ids of them again. So the batch
# holds ids as they are, and the matrix is made of it. Penalties over tables are off (docs/quickstart.md).

PENALTIES = {"l2_reg_embedding": 0, "l2_reg_linear": 0}
HISTORY = ("hist_item", "neg_hist_item")


def deepctr_columns(*, history: bool = False, dense: bool = True) -> list[Any]:
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat

    columns = [SparseFeat(name, rows, DIM) for name, rows in ROWS.items()]
    for name in HISTORY if history else ():
        of = SparseFeat(name, ROWS["item"], DIM, embedding_name="item")
        columns.append(VarLenSparseFeat(of, LENGTH, length_name="length"))
    if not history:
        columns.append(VarLenSparseFeat(SparseFeat("tags", 80, DIM), TAGS, combiner="mean"))
    return [*columns, *([DenseFeat("price", 2)] if dense else [])]


def deepctr_batch(random: np.random.Generator, tasks: tuple[int, ...]) -> dict[str, Tensor]:
    batch = {name: ids(random, rows, BATCH_SIZE, 1, first=1) for name, rows in ROWS.items()}
    batch |= {"tags": ids(random, 80, BATCH_SIZE, TAGS)}  # 0 is none
    length = torch.from_numpy(random.integers(1, LENGTH + 1, (BATCH_SIZE, 1)).astype(np.float32))
    there = torch.arange(LENGTH) < length
    for name in HISTORY:
        batch[name] = ids(random, ROWS["item"], BATCH_SIZE, LENGTH, first=1) * there
    price = torch.from_numpy(random.random((BATCH_SIZE, 2), np.float32))
    return batch | {"length": length, "price": price, "label": clicks(random, *tasks)}


def deepctr(
    name: str, *, linear: bool = True, history: bool = False, tasks: int = 0, quick: bool = False, **options: Any
) -> Case:
    def make() -> Trial:
        from deepctr_torch import models

        kind = getattr(models, name)
        columns = deepctr_columns(history=history, dense=name not in ("AFM", "CCPM"))
        arguments = [columns, *([columns] if linear else []), *([["item"]] if history else [])]
        taken = signature(kind).parameters
        settings = {"init_std": 0.1, "dnn_hidden_units": (16,), **PENALTIES, **options}
        settings = {key: value for key, value in settings.items() if key in taken}

        def build() -> Any:
            model = kind(*arguments, **settings)
            if name in ("DCN", "DCNMix", "MLR"):  # which have no argument for the penalty of some of their tables
                model.regularization_weight.clear()
            return model

        def matrix(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
            return torch.cat([batch[column].float() for column in model.feature_index], 1)

        def predict(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
            found: Tensor = model(matrix(model, batch))
            return found

        def loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
            found = predict(model, batch).view(batch["label"].shape)
            of_clicks = functional.binary_cross_entropy(found, batch["label"])
            return of_clicks + (model.get_regularization_loss() + model.aux_loss).sum()

        batches = each_batch(partial(deepctr_batch, tasks=(tasks,) if tasks else ()))
        used = [column.name for column in columns]
        batches = [{key: part for key, part in batch.items() if key in (*used, "length", "label")} for batch in batches]
        features: dict[str, list[str]] = {}
        for layer in embeddings(kind(*arguments, **settings)):
            *_, within, of = layer.split(".")
            if of in ("emb1", "emb2"):  # of ONN, two for each pair of features
                of = within.split("+")[of == "emb2"]
            for feature in [of, *(HISTORY if history and of == "item" else ())]:
                features.setdefault(feature, []).append(layer)
        return Trial(build, batches, loss, predict, features)

    return Case("deepctr-torch", name, make, quick=quick)


DEEPCTR = [
    deepctr("WDL", quick=True),
    deepctr("DeepFM", quick=True),
    deepctr("xDeepFM", cin_layer_size=(8, 8)),
    deepctr("AFM"),
    deepctr("DIFM"),
    deepctr("IFM"),
    deepctr("AutoInt"),
    deepctr("DCN"),
    deepctr("DCNMix"),
    deepctr("FiBiNET"),
    deepctr("NFM"),
    deepctr("MLR"),
    deepctr("ONN"),
    deepctr("PNN", linear=False),
    deepctr("CCPM"),
    deepctr("AFN", ltl_hidden_size=8),
    deepctr("DIN", linear=False, history=True, quick=True),
    deepctr("DIEN", linear=False, history=True, use_negsampling=True),
    deepctr("SharedBottom", linear=False, tasks=2),
    deepctr("ESMM", linear=False, tasks=2),
    deepctr("MMOE", linear=False, tasks=2),
    deepctr("PLE", linear=False, tasks=2),
]

# torch-rechub: the batch is what the model is called with, and its names are those of the tables, but for features that
# share the table of another.

SHARED = {"item": ("hist_item", "neg_hist_item", "neg_item"), "seq": ("pos", "neg")}
MLP = {"dims": [16, 8], "dropout": 0.1}


class Columns:
    """Features of torch-rechub, which hold the layer that looks them up: new ones for each model."""

    def __init__(self) -> None:
        from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
        from torch_rechub.basic.initializers import RandomNormal

        def sequence(name: str, pooling: str = "concat", **options: Any) -> Any:
            rows = 80 if name == "tags" else ROWS["item"]
            return SequenceFeature(name, rows, DIM, pooling, initializer=RandomNormal(0, 0.1), **options)

        def sparse(name: str, rows: int, dim: int = DIM, **options: Any) -> Any:
            return SparseFeature(name, rows, dim, initializer=RandomNormal(0, 0.1), **options)

        self.user, self.city = sparse("user", ROWS["user"]), sparse("city", ROWS["city"])
        self.item = sparse("item", ROWS["item"], padding_idx=0)
        self.neg_one = sparse("neg_item", ROWS["item"], shared_with="item")
        self.tags = sequence("tags", "mean", padding_idx=0)
        self.price, self.weight = DenseFeature("price"), DenseFeature("weight")
        self.history = sequence("hist_item", shared_with="item", padding_idx=0)
        self.neg_history = sequence("neg_hist_item", shared_with="item", padding_idx=0)
        self.neg_items = sequence("neg_item", shared_with="item")
        self.only_history = sequence("hist_item", padding_idx=0)
        self.seq = [sequence("seq", padding_idx=0), *(sequence(name, shared_with="seq") for name in ("pos", "neg"))]
        self.sparse = [self.user, self.item, self.city]
        self.all = [*self.sparse, self.tags, self.price]
        self.linear = [sparse(name, rows, 1) for name, rows in ROWS.items()]
        self.crossed = [sparse(name, rows * len(ROWS)) for name, rows in ROWS.items()]


def rechub_batch(random: np.random.Generator, shape: tuple[int, ...]) -> dict[str, Tensor]:
    there = torch.arange(LENGTH) < torch.from_numpy(random.integers(1, LENGTH + 1, (BATCH_SIZE, 1)))
    batch = {name: ids(random, rows, BATCH_SIZE, first=1) for name, rows in ROWS.items()}
    batch |= {"tags": ids(random, 80, BATCH_SIZE, TAGS)}
    for name in ("hist_item", "neg_hist_item", "seq", "pos", "neg"):
        batch[name] = ids(random, ROWS["item"], BATCH_SIZE, LENGTH, first=1) * there
    batch["neg_item"] = ids(random, ROWS["item"], BATCH_SIZE, *shape, first=1)
    for name in ROWS:  # the rows of DeepFFM, which has for each id one for each other feature
        batch[f"{name}_rows"] = batch[name][:, None] * len(ROWS) + torch.arange(len(ROWS))
    for name in ("price", "weight"):
        batch[name] = torch.from_numpy(0.5 + random.random(BATCH_SIZE, np.float32))
    return batch | {"label": clicks(random), "labels": clicks(random, 2)}


def of_click(found: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of one probability or of several, with what the model adds to it."""
    found, more = found if isinstance(found, tuple) else (found, 0)
    label = batch["labels"] if found.dim() > 1 and found.shape[-1] == 2 else batch["label"]
    return functional.binary_cross_entropy(found.view(label.shape), label) + more


def of_pair(found: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return -functional.logsigmoid(found[0] - found[1]).mean()


def of_first(found: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(found, torch.zeros(len(found), dtype=torch.int64))


def of_item(found: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(found, batch["item"])


def of_next(found: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(found.flatten(0, 1), batch["pos"].flatten())


def rechub(
    module: str,
    name: str,
    arguments: Callable[[Columns], Mapping[str, Any]],
    loss: Callable[[Any, Mapping[str, Tensor]], Tensor] = of_click,
    call: Callable[[Any, Mapping[str, Tensor]], Any] = lambda model, batch: model(batch),
    keep: Sequence[str] = (),
    label: str = "",
    why: str = "",
    error: str = "",
    quick: bool = False,
) -> Case:
    def make() -> Trial:
        from importlib import import_module

        kind = getattr(import_module(f"torch_rechub.models.{module}"), name)
        layers = embeddings(kind(**arguments(Columns())), keep)
        features: dict[str, list[str]] = {}
        for layer in layers:
            of = layer.rpartition(".")[2]
            of = {"item_embedding": "item", "item_emb": "item", "token_embedding": "seq"}.get(of, of)
            shared = () if module == "multi_task" else SHARED.get(of, ())
            for feature in [f"{of}_rows"] if layer.startswith("ffm_") else [of, *shared]:
                features.setdefault(feature, []).append(layer)

        def build() -> Any:
            model = kind(**arguments(Columns()))
            if name == "ComirecDR":  # which leaves a weight as it finds it in memory
                nn.init.normal_(model.capsule.w, std=0.1)
            if label == "DSSM (SENet)":  # whose gates could all be closed, and then no row is trained
                for weight in (*model.user_senet.parameters(), *model.item_senet.parameters()):
                    weight.data.abs_()
            return model

        shape = () if name == "FaceBookDSSM" else (3,)
        batches = each_batch(partial(rechub_batch, shape=shape))
        return Trial(
            build=build,
            batches=batches,
            loss=lambda model, batch: loss(call(model, batch), batch),
            predict=call,
            features=features,
            keep=keep,
        )

    return Case("torch-rechub", label or name, make, why, error, quick)


def in_batch(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Each history against its own item and that of its neighbour."""
    users, items = model.user_tower(batch), model.item_tower(batch)
    return (users * items).sum(-1), (users * items.roll(1, 0)).sum(-1)


def of_seq(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = model(batch["seq"])
    return found


def matching(c: Columns, **options: Any) -> dict[str, Any]:
    named = {"history_features": [c.history], "neg_item_feature": [c.neg_items]}
    return {"user_features": [c.user, c.city], "item_features": [c.item], **named, **options}


def towers(c: Columns) -> dict[str, Any]:
    params = {"user_params": {"dims": [16, 8]}, "item_params": {"dims": [16, 8]}}
    return {"user_features": [c.user, c.city], "item_features": [c.item, c.tags], **params}


def tasks(c: Columns, **options: Any) -> dict[str, Any]:
    return {"features": c.all, "task_types": ["classification"] * 2, "tower_params_list": [MLP] * 2, **options}


HSTU = {
    "vocab_size": ROWS["item"],
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 1,
    "dqk": 8,
    "dv": 8,
    "max_seq_len": LENGTH,
}
POSITIONS = ("position_embedding", "time_embedding")
RECHUB = [
    rechub("ranking", "WideDeep", lambda c: {"wide_features": c.sparse, "deep_features": c.all, "mlp_params": MLP}),
    rechub("ranking", "DeepFM", lambda c: {"deep_features": c.all, "fm_features": c.sparse, "mlp_params": MLP}),
    rechub("ranking", "DCN", lambda c: {"features": c.all, "n_cross_layers": 2, "mlp_params": MLP}),
    rechub("ranking", "DCNv2", lambda c: {"features": c.all, "n_cross_layers": 2, "mlp_params": MLP}),
    rechub("ranking", "EDCN", lambda c: {"features": c.sparse, "n_cross_layers": 2, "mlp_params": MLP}),
    rechub("ranking", "AFM", lambda c: {"fm_features": c.sparse, "embed_dim": DIM, "t": 8}),
    rechub("ranking", "FiBiNet", lambda c: {"features": c.sparse, "mlp_params": MLP}),
    rechub(
        "ranking", "AutoInt", lambda c: {"sparse_features": c.sparse, "dense_features": [c.price], "mlp_params": MLP},
    ),
    rechub(
        "ranking", "DeepFFM",
        lambda c: {"linear_features": c.linear, "cross_features": c.crossed, "embed_dim": DIM, "mlp_params": MLP},
    ),
    rechub(
        "ranking", "FatDeepFFM",
        lambda c: {
            "linear_features": c.linear, "cross_features": c.crossed, "embed_dim": DIM, "reduction_ratio": 1,
            "mlp_params": MLP,
        },
    ),
    rechub(
        "ranking", "BST",
        lambda c: {
            "features": [c.user, c.city], "history_features": [c.history], "target_features": [c.item],
            "mlp_params": MLP, "nhead": 2, "max_seq_len": LENGTH + 1,
        },
        keep=["pos_embedding"],
    ),
    rechub(
        "ranking", "DIN",
        lambda c: {
            "features": [c.user, c.city], "history_features": [c.history], "target_features": [c.item],
            "mlp_params": MLP, "attention_mlp_params": {"dims": [8]},
        },
        quick=True,
    ),
    rechub(
        "ranking", "DIEN",
        lambda c: {
            "features": [c.user, c.city], "history_features": [c.history], "neg_history_features": [c.neg_history],
            "target_features": [c.item], "mlp_params": {"dims": [16]},
        },
    ),
    rechub("multi_task", "SharedBottom", lambda c: tasks(c, bottom_params={"dims": [16]})),
    rechub("multi_task", "MMOE", lambda c: tasks(c, n_expert=2, expert_params={"dims": [16]}), quick=True),
    rechub(
        "multi_task", "PLE",
        lambda c: tasks(c, n_level=2, n_expert_specific=1, n_expert_shared=1, expert_params={"dims": [16]}),
    ),
    rechub(
        "multi_task", "AITM",
        lambda c: {"features": c.all, "n_task": 2, "bottom_params": {"dims": [16]}, "tower_params_list": [MLP] * 2},
    ),
    rechub(
        "multi_task", "ESMM",
        lambda c: {"user_features": [c.user, c.city], "item_features": [c.item], "cvr_params": MLP, "ctr_params": MLP},
        loss=lambda found, batch: functional.binary_cross_entropy(found[:, 1:], batch["labels"]),
    ),
    rechub("matching", "DSSM", towers, quick=True),
    rechub("matching.dssm_senet", "DSSM", towers, label="DSSM (SENet)"),
    rechub(
        "matching", "FaceBookDSSM",
        lambda c: {
            "user_features": [c.user, c.city], "pos_item_features": [c.item], "neg_item_features": [c.neg_one],
            "user_params": {"dims": [16, 8]}, "item_params": {"dims": [16, 8]},
        },
        of_pair,
    ),
    rechub(
        "matching", "YoutubeDNN",
        lambda c: {
            "user_features": [c.user, c.tags], "item_features": [c.item], "neg_item_feature": [c.neg_items],
            "user_params": {"dims": [16, DIM]},
        },
        of_first,
    ),
    rechub(
        "matching", "YoutubeSBC",
        lambda c: {**towers(c), "sample_weight_feature": [c.weight], "batch_size": BATCH_SIZE},
        of_first,
    ),
    rechub("matching", "GRU4Rec", lambda c: matching(c, user_params={"dims": [16, DIM]}), of_first),
    rechub("matching", "MIND", lambda c: matching(c, max_length=LENGTH), of_first),
    rechub("matching", "ComirecSA", matching, of_first),
    rechub("matching", "ComirecDR", lambda c: matching(c, max_length=LENGTH), of_first),
    rechub(
        "matching", "SASRec",
        lambda c: {"features": c.seq, "max_len": LENGTH, "num_heads": 2},
        of_pair,
        keep=["position_emb"],
        quick=True,
    ),
    rechub(
        "matching", "SINE",
        lambda c: {
            "history_features": ["hist_item"], "item_features": ["item"], "neg_item_features": ["neg_item"],
            "num_items": ROWS["item"], "embedding_dim": DIM, "hidden_dim": 8, "num_concept": 6, "num_intention": 2,
            "seq_max_len": LENGTH,
        },
        of_first,
        keep=["concept_embedding", "position_embedding"],
    ),
    rechub(
        "matching", "NARM",
        lambda c: {
            "item_history_feature": c.only_history, "hidden_dim": 8, "emb_dropout_p": 0.1,
            "session_rep_dropout_p": 0.1, "item_feature": c.item,
        },
        of_pair, in_batch, label="NARM (item_feature=)",
    ),
    rechub(
        "matching", "NARM",
        lambda c: {
            "item_history_feature": c.only_history, "hidden_dim": 8, "emb_dropout_p": 0.1, "session_rep_dropout_p": 0.1,
        },
        of_item, why=SCORES, error=whole("T", "item_emb"),
    ),
    rechub(
        "matching", "STAMP",
        lambda c: {"item_history_feature": c.only_history, "weight_std": 0.1, "emb_std": 0.1, "item_feature": c.item},
        of_pair, in_batch, label="STAMP (item_feature=)",
    ),
    rechub(
        "matching", "STAMP",
        lambda c: {"item_history_feature": c.only_history, "weight_std": 0.1, "emb_std": 0.1},
        of_item, why=SCORES, error=whole("T", "item_emb"),
    ),
    rechub(
        "generative", "HSTUModel", lambda c: HSTU, of_next, of_seq, keep=POSITIONS,
        why=SCORES, error=whole("linear", "token_embedding"),
    ),
    rechub(
        "generative", "HSTUModel", lambda c: {**HSTU, "tie_embeddings": False}, of_next, of_seq, keep=POSITIONS,
        label="HSTUModel (tie_embeddings=False)",
    ),
    rechub(
        "generative", "HLLMModel",
        lambda c: {
            "item_embeddings": torch.zeros(ROWS["item"], 8), "vocab_size": ROWS["item"], "d_model": 8, "n_heads": 2,
            "n_layers": 1, "max_seq_len": LENGTH,
        },
        of_next, of_seq, keep=POSITIONS,
        why="has no table of items", error="ModelError: HLLMModel has no nn.EmbeddingBag or nn.Embedding layer",
    ),
]  # fmt: skip
RECHUB_LEFT_OUT = {"RQVAEModel": "takes vectors, not ids", "TIGERModel": "needs transformers"}
