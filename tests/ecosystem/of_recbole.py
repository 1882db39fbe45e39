"""The models of RecBole, each with its own default settings in small.

RecBole's readers of files don't work with the pandas and NumPy of constraints.txt, so its data set is made of tensors
here, as they would be after reading; all that models ask of it are its own methods. Its models get batches of its own
class.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from ecosystem.models import DIM, LENGTH, PENALTY, SCORES, Case, clicks, each_batch, embeddings, ids, whole
from ecosystem.training import BATCH_SIZE, Trial, built, seed

SIZES = {
    "user_id": 120, "age": 12, "gender": 3, "item_id": 160, "class": 20, "tags": 30, "entity_id": 220, "head_id": 220,
    "tail_id": 220, "relation_id": 9,
}  # fmt: skip
NUM_CLICKS = 600
SMALL = {
    "embedding_size": DIM, "hidden_size": DIM, "inner_size": 16, "mlp_hidden_size": [16, 8], "n_layers": 1,
    "n_heads": 2, "MAX_ITEM_LIST_LENGTH": LENGTH, "use_gpu": False, "train_batch_size": BATCH_SIZE, "loss_type": "BPR",
    "kg_embedding_size": DIM, "kg_reverse_r": False,
}  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """What RecBole changes for the whole process is changed for a while: names of NumPy, YAML's numbers, autograd."""
    import yaml
    from recbole.config import Config
    from scipy.sparse import dok_matrix

    loader = type("Loader", (yaml.FullLoader,), {})
    with (
        patch.object(Config, "compatibility_settings", lambda _: None),
        patch.object(np, "float", float, create=True),
        patch.object(yaml, "FullLoader", loader),
        patch.object(dok_matrix, "_update", lambda matrix, found: matrix._dict.update(found), create=True),
        patch.object(sys, "argv", ["recbole"]),
        patch.object(logging.getLogger(), "level", logging.CRITICAL),
        torch.autograd.set_detect_anomaly(False),  # which SINE turns on
    ):
        yield


def config_of(name: str, **settings: Any) -> Any:
    from recbole.config import Config

    if settings.get("loss_type") == "CE":
        settings["train_neg_sample_args"] = None
    with quiet():
        return Config(name, "none", config_dict=SMALL | settings)


FIELDS = {
    "user_id": ("TOKEN", "USER_ID"),
    "age": ("TOKEN", "USER"),
    "gender": ("TOKEN", "USER"),
    "item_id": ("TOKEN", "ITEM_ID"),
    "class": ("TOKEN", "ITEM"),
    "tags": ("TOKEN_SEQ", "ITEM"),
    "rating": ("FLOAT", "INTERACTION"),
    "timestamp": ("FLOAT", "INTERACTION"),
    "label": ("FLOAT", "INTERACTION"),
    "entity_id": ("TOKEN", "KG"),
    "head_id": ("TOKEN", "KG"),
    "tail_id": ("TOKEN", "KG"),
    "relation_id": ("TOKEN", "KG"),
}
"""The type of each field, and the file in which it would be."""


def data_of(config: Any) -> Any:
    """A data set as RecBole has it once its files are read."""
    from recbole.data.dataset import KnowledgeBasedDataset
    from recbole.data.interaction import Interaction
    from recbole.utils import FeatureSource, FeatureType

    data = KnowledgeBasedDataset.__new__(KnowledgeBasedDataset)
    data.config, data.logger, data.dataset_name = config, logging.getLogger(), "none"
    data._get_preset()
    data._get_field_from_config()
    data.field2type = {name: FeatureType[kind] for name, (kind, _) in FIELDS.items()}
    data.field2source = {name: FeatureSource[source] for name, (_, source) in FIELDS.items()}
    data.field2seqlen = dict.fromkeys(FIELDS, 1) | {"tags": 3, "item_id_list": LENGTH}
    data.field2id_token = {name: [f"{name} {number}" for number in range(rows)] for name, rows in SIZES.items()}
    data.field2id_token["relation_id"][-1] = "[UI-Relation]"

    random = np.random.default_rng(1)
    users, items = torch.arange(SIZES["user_id"]), torch.arange(SIZES["item_id"])
    each = torch.arange(NUM_CLICKS)

    def some(name: str, *shape: int, first: int = 0) -> Tensor:
        return ids(random, SIZES[name], *shape, first=first)

    with quiet():
        data.inter_feat = Interaction({
            "user_id": 1 + each % (len(users) - 1), "item_id": 1 + each % (len(items) - 1),
            "item_id_list": some("item_id", NUM_CLICKS, LENGTH), "item_length": torch.full_like(each, LENGTH),
            "rating": 1 + each % 5.0, "timestamp": each.float(),
        })  # fmt: skip
        data.user_feat = Interaction(
            {"user_id": users, "age": some("age", len(users)), "gender": some("gender", len(users))}
        )
        data.item_feat = Interaction(
            {"item_id": items, "class": some("class", len(items)), "tags": some("tags", len(items), 3)}
        )
        heads = 1 + each % (SIZES["head_id"] - 1)
        tails, relations = some("tail_id", NUM_CLICKS, first=1), 1 + each % (SIZES["relation_id"] - 2)
        data.kg_feat = Interaction({"head_id": heads, "relation_id": relations, "tail_id": tails})
    data._preloaded_weight = {
        name: random.random((SIZES[of], DIM), np.float32)
        for name, of in (("ent_id", "entity_id"), ("rel_id", "relation_id"))
    }
    return data


def batch_of(data: Any, random: np.random.Generator) -> dict[str, Tensor]:
    """Everything that RecBole's loaders give one or another of its models; item 0 is none."""

    def some(name: str, *shape: int) -> Tensor:
        return ids(random, SIZES[name], BATCH_SIZE, *shape, first=1)

    length = torch.from_numpy(random.integers(1, LENGTH + 1, BATCH_SIZE))
    there = torch.arange(LENGTH) < length[:, None]
    batch = {"user_id": some("user_id"), "item_id": some("item_id"), "neg_item_id": some("item_id")}
    for name in ("item_id_list", "neg_item_id_list", "Mask_item_id_list", "sem_aug"):
        batch[name] = some("item_id", LENGTH) * there
    batch |= {"Pos_item_id": some("item_id", 2), "Neg_item_id": some("item_id", 2)}
    batch |= {"MASK_INDEX": ids(random, LENGTH, BATCH_SIZE, 2), "item_length": length, "sem_aug_lengths": length}
    batch |= {name: data.user_feat[name][batch["user_id"]] for name in ("age", "gender")}
    batch |= {name: data.item_feat[name][batch["item_id"]] for name in ("class", "tags")}
    for name in ("head_id", "tail_id", "neg_tail_id"):
        batch[name] = some("entity_id")
    batch["relation_id"] = ids(random, SIZES["relation_id"] - 1, BATCH_SIZE, first=1)
    return batch | {"label": clicks(random)}


NAMED = {
    "user": ("user_id",),
    "UI_emb": ("user_id",),
    "relation": ("relation_id",),
    "trans_w": ("relation_id",),
    "item": ("item_id", "neg_item_id", "item_id_list"),
}
"""Which fields feed a layer, by a word in its name."""


def loss_of(model: Any, batch: Any) -> Tensor:
    """All of a model's losses."""
    names = ("calculate_loss", "calculate_rs_loss", "calculate_kg_loss")
    found = [getattr(model, name)(batch) for name in names if name in vars(type(model))]
    parts = [part for each in found for part in (each if isinstance(each, tuple) else (each,))]
    return sum((part.sum() for part in parts), torch.zeros(()))


def recbole(
    name: str,
    *,
    keep: Sequence[str] = (),
    made: Sequence[str] = (),
    why: str = "",
    error: str = "",
    label: str = "",
    quick: bool = False,
    **settings: Any,
) -> Case:
    """Layers in `made` look up ids that the model makes of a batch: the batch names them too, as a plain pass shows."""

    def make() -> Trial:
        from recbole.data.interaction import Interaction
        from recbole.model.loss import BPRLoss
        from recbole.utils import get_model

        config = config_of(name, **settings)
        data = data_of(config)

        def build() -> Any:
            with quiet():
                model = get_model(name)(config, data)
            if label == "S3Rec (finetune)":  # which reads the model that was trained before from a file
                model.train_stage, model.loss_fct = "finetune", BPRLoss()
            if name == "KTUP":  # whose penalty has an edge where rows have length 1, as they do at first
                for layer in embeddings(model):
                    model.get_submodule(layer).weight.data.mul_(0.9)
            return model

        model = built(Trial(build, [], loss_of, loss_of))
        layers = [layer for layer in embeddings(model) if layer not in keep]
        by_model = [layer for layer in layers if any(part in layer for part in made)]
        batches, unused = [], set(by_model)
        for fields in each_batch(lambda random: batch_of(data, random)):
            found = recorded(model, Interaction(fields), by_model)
            unused -= found.keys()
            batches.append(Interaction(fields | {rows_of(layer): rows for layer, rows in found.items()}))
        features: dict[str, list[str]] = {}
        for layer in layers:
            word = next((word for word in NAMED if word in layer), "item")
            for feature in () if layer in unused else [rows_of(layer)] if layer in by_model else NAMED[word]:
                features.setdefault(feature, []).append(layer)
        return Trial(build, batches, loss_of, lambda model, batch: model.predict(batch), features, [*keep, *unused])

    return Case("RecBole", label or name, make, why, error, quick)


def recorded(model: nn.Module, batch: Any, layers: Sequence[str]) -> dict[str, Tensor]:
    """The ids that layers are given in a pass over a batch."""
    found: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    hooks = [
        model.get_submodule(layer).register_forward_pre_hook(
            lambda _, given, layer=layer: found[layer].append(given[0].flatten())
        )
        for layer in layers
    ]
    if layers:
        seed(6)
        with torch.no_grad():
            loss_of(model, batch)
            model.predict(batch)
    for hook in hooks:
        hook.remove()
    return {layer: torch.cat(several) for layer, several in found.items() if several}


def rows_of(layer: str) -> str:
    """The field that names the rows of a layer."""
    return f"rows of {layer.replace('.', ' ')}"


GRAPH = "convolves a graph of all users and items in each batch"
DRAWS = "draws ids of its own for each batch"
FIRST_ORDER = ("first_order_linear.token_embedding_table.embedding", "first_order_linear.token_seq_embedding_table.0")
TWO_NEGATIVES = {"distribution": "uniform", "sample_num": 2, "alpha": 1.0, "dynamic": False, "candidate_num": 0}
MASKED = {"MASK_ITEM_SEQ": "Mask_item_id_list", "POS_ITEMS": "Pos_item_id", "NEG_ITEMS": "Neg_item_id"}
POSITIONS = ("position_embedding",)
PREFERENCES = ("pref_embedding", "pref_norm_embedding", "relation_embedding", "relation_norm_embedding")
CONTEXT = (
    "AFM", "AutoInt", "DCN", "DCNV2", "DeepFM", "DSSM", "EulerNet", "FFM", "FiGNN", "FM", "FNN", "FwFM", "KD_DAGFM",
    "LR", "NFM", "PNN", "WideDeep",
)  # fmt: skip
GRAPHS = ("DGCF", "LightGCN", "NCL", "NGCF", "SGL", "SpectralCF")
RECBOLE = [
    *(recbole(name, made=["token"], quick=name == "DeepFM") for name in CONTEXT),
    recbole("xDeepFM", made=["token"], why=PENALTY, error=whole("norm", FIRST_ORDER[0])),
    recbole("xDeepFM", label="xDeepFM (first-order tables kept)", made=["token"], keep=FIRST_ORDER),
    recbole("BPR", quick=True),
    recbole("CDAE", loss_type="BCE", why=PENALTY, error=whole("norm", "h_user")),
    recbole("ConvNCF", embedding_size=64, why=PENALTY, error=whole("norm", "user_embedding")),
    recbole("ENMF", made=["item"], why=SCORES, error=whole("unsqueeze", "item_embedding")),
    recbole("FISM", made=["item"], why=PENALTY, error=whole("norm", "item_src_embedding")),
    *(recbole(name, why=GRAPH, error=whole("cat", "user_embedding")) for name in GRAPHS),
    recbole("LINE", why=DRAWS, error="ModelError: layer 'user_embedding' is given id"),
    recbole("MacridVAE", keep=["k_embedding"], why=SCORES, error=whole("normalize", "item_embedding")),
    recbole("NAIS", made=["item"], why=PENALTY, error=whole("norm", "item_src_embedding")),
    recbole("NeuMF", quick=True),
    recbole("NNCF", made=["neigh"], neigh_info_method="random"),
    recbole("SimpleX", made=["item"], train_neg_sample_args=TWO_NEGATIVES),
    recbole("BERT4Rec", keep=POSITIONS, made=["item"], MASK_INDEX="MASK_INDEX", **MASKED),
    recbole("Caser", why=PENALTY, error=whole("norm", "user_embedding")),
    recbole(
        "CORE", loss_type="CE", keep=["net.position_embedding"],
        why=SCORES, error=whole("dropout", "item_embedding"),
    ),
    recbole("DIEN", made=["token"]),
    recbole("DIN", made=["token"]),
    recbole("FDSA", keep=POSITIONS, made=["token"]),
    recbole("FEARec", keep=POSITIONS, n_layers=2),
    recbole("FOSSIL"),
    recbole("FPMC"),
    recbole("GCSAN", why=PENALTY, error=whole("norm", "item_embedding")),
    recbole("GRU4Rec", quick=True),
    recbole("GRU4Rec", label="GRU4Rec (CE)", loss_type="CE", why=SCORES, error=whole("transpose", "item_embedding")),
    recbole("GRU4RecCPR", loss_type="CE", why=SCORES, error=whole("linear", "item_embedding")),
    recbole("GRU4RecF", made=["token"]),
    recbole("GRU4RecKG", made=["entity"]),
    recbole("HGN"),
    recbole("HRM"),
    recbole("KSR", made=["entity"]),
    recbole("LightSANs", keep=POSITIONS),
    recbole("NARM"),
    recbole("NextItNet", why=PENALTY, error=whole("norm", "item_embedding")),
    recbole("NPE"),
    recbole("RepeatNet", loss_type="CE"),
    recbole(
        "S3Rec", keep=[*POSITIONS, "feature_embedding"], made=["item"],
        why=DRAWS, error="ModelError: layer 'item_embedding' is given id",
    ),
    recbole("S3Rec", label="S3Rec (finetune)", keep=POSITIONS, made=["feature"]),
    recbole("SASRec", keep=POSITIONS, quick=True),
    recbole("SASRecCPR", loss_type="CE", keep=POSITIONS, why=SCORES, error=whole("linear", "item_embedding")),
    recbole("SASRecF", keep=POSITIONS, made=["token"]),
    recbole("SHAN", INVERSE_ITEM_SEQ="item_id_list"),
    recbole("SINE", keep=["C"]),
    recbole("SRGNN"),
    recbole("STAMP"),
    recbole("TransRec"),
    recbole("CFKG", made=["entity"], keep=["relation_embedding"]),
    recbole("CKE", made=["entity"]),
    recbole("KGCN", made=["entity", "relation"]),
    recbole("KGNNLS", made=["entity", "relation"]),
    recbole("KTUP", made=["entity", "item"], keep=PREFERENCES, use_st_gumbel=False),
    recbole("MKR", made=["entity", "item"]),
    recbole("RippleNet", made=["entity", "relation"]),
]  # fmt: skip
NO_TABLES = (
    "ADMMSLIM", "AsymKNN", "DiffRec", "DMF", "EASE", "GCMC", "ItemKNN", "LDiffRec", "MultiDAE", "MultiVAE", "NCEPLRec",
    "Pop", "RaCT", "Random", "RecVAE", "SLIMElastic",
)  # fmt: skip
RECBOLE_LEFT_OUT = {
    **dict.fromkeys(NO_TABLES, "has no embedding table"),
    "KGAT": "needs DGL",
    "KGIN": "needs torch-scatter",
    "MCCLK": "needs torch-scatter",
}
