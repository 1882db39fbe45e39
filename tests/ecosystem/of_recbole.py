"""The models of RecBole, each with its own default settings in small.

RecBole's readers of files don't work with the pandas and NumPy of constraints.txt, so its data set is made of tensors
here, as they would be after reading; all that models ask of it are its own methods. Its models get batches of its own
class.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from ecosystem.models import Case, clicks, each_batch, embeddings, ids
from ecosystem.training import BATCH_SIZE, Trial, built, seed

LENGTH = 6
TOKENS = {"user_id": 120, "age": 12, "gender": 3, "item_id": 160, "class": 20}
ENTITIES, RELATIONS = 220, 9
SMALL = {
    "embedding_size": 8, "hidden_size": 8, "inner_size": 16, "mlp_hidden_size": [16, 8], "n_layers": 1, "n_heads": 2,
    "MAX_ITEM_LIST_LENGTH": LENGTH, "use_gpu": False, "train_batch_size": BATCH_SIZE, "loss_type": "BPR",
    "kg_embedding_size": 8, "kg_reverse_r": False,
}  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """What RecBole changes for the whole process it changes for a while: names of NumPy, numbers of YAML, logs, autograd."""
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


def data_of(config: Any) -> Any:
    from recbole.data.dataset import KnowledgeBasedDataset
    from recbole.data.interaction import Interaction
    from recbole.utils import FeatureSource as Source
    from recbole.utils import FeatureType as Kind

    data = KnowledgeBasedDataset.__new__(KnowledgeBasedDataset)
    random = np.random.default_rng(1)
    data.config, data.logger, data.dataset_name = config, logging.getLogger(), "none"
    data._get_preset()
    data._get_field_from_config()
    data.field2type = {
        "user_id": Kind.TOKEN, "item_id": Kind.TOKEN, "age": Kind.TOKEN, "gender": Kind.TOKEN, "class": Kind.TOKEN,
        "tags": Kind.TOKEN_SEQ, "label": Kind.FLOAT, "rating": Kind.FLOAT, "timestamp": Kind.FLOAT,
        "entity_id": Kind.TOKEN, "head_id": Kind.TOKEN, "tail_id": Kind.TOKEN, "relation_id": Kind.TOKEN,
    }
    of_user, of_item, of_both = (Source.USER,), (Source.ITEM,), Source.INTERACTION
    data.field2source = {
        "user_id": Source.USER_ID, "item_id": Source.ITEM_ID, "age": Source.USER, "gender": Source.USER,
        "class": Source.ITEM, "tags": Source.ITEM, "label": Source.INTERACTION, "rating": Source.INTERACTION,
        "timestamp": Source.INTERACTION, "entity_id": Source.KG, "head_id": Source.KG, "tail_id": Source.KG,
        "relation_id": Source.KG,
    }
    data.field2seqlen = dict.fromkeys(data.field2type, 1) | {"tags": 3, "item_id_list": LENGTH}
    sizes = {**TOKENS, "tags": 30, "entity_id": ENTITIES, "head_id": ENTITIES, "tail_id": ENTITIES, "relation_id": RELATIONS}
    data.field2id_token = {name: [f"{name}{n}" for n in range(size)] for name, size in sizes.items()}
    data.field2id_token["relation_id"][-1] = "[UI-Relation]"
    with quiet():
        n = 600
        data.inter_feat = Interaction({
            "user_id": ids(random, TOKENS["user_id"], n, first=1), "item_id": torch.arange(n) % (TOKENS["item_id"] - 1) + 1,
            "item_id_list": ids(random, TOKENS["item_id"], n, LENGTH), "item_length": torch.full((n,), LENGTH), "rating": torch.from_numpy(random.integers(1, 6, n).astype(np.float32)), "timestamp": torch.arange(n).float(),
        })
        data.user_feat = Interaction({"user_id": torch.arange(TOKENS["user_id"]), "age": ids(random, 12, TOKENS["user_id"]), "gender": ids(random, 3, TOKENS["user_id"])})
        m = TOKENS["item_id"]
        data.item_feat = Interaction({"item_id": torch.arange(m), "class": ids(random, 20, m), "tags": ids(random, 30, m, 3)})
        data.kg_feat = Interaction({"head_id": ids(random, ENTITIES, n, first=1), "relation_id": ids(random, RELATIONS - 1, n, first=1), "tail_id": ids(random, ENTITIES, n, first=1)})
    data._preloaded_weight = {"ent_id": random.random((ENTITIES, 8), np.float32), "rel_id": random.random((RELATIONS, 8), np.float32)}
    return data


def batch_of(data: Any, random: np.random.Generator) -> dict[str, Tensor]:
    """Everything that RecBole's loaders give one or another of its models."""
    of_user, of_item = data.user_feat.interaction, data.item_feat.interaction
    batch = {"user_id": ids(random, TOKENS["user_id"], BATCH_SIZE, first=1)}
    length = torch.from_numpy(random.integers(1, LENGTH + 1, BATCH_SIZE))
    there = torch.arange(LENGTH) < length[:, None]
    for name in ("item_id", "neg_item_id"):
        batch[name] = ids(random, TOKENS["item_id"], BATCH_SIZE, first=1)
    for name in ("item_id_list", "neg_item_id_list", "Mask_item_id_list", "sem_aug"):
        batch[name] = ids(random, TOKENS["item_id"], BATCH_SIZE, LENGTH, first=1) * there
    for name in ("Pos_item_id", "Neg_item_id"):
        batch[name] = ids(random, TOKENS["item_id"], BATCH_SIZE, 2, first=1)
    batch |= {"item_length": length, "sem_aug_lengths": length, "MASK_INDEX": ids(random, LENGTH, BATCH_SIZE, 2)}
    batch |= {name: of_user[name][batch["user_id"]] for name in ("age", "gender")}
    batch |= {name: of_item[name][batch["item_id"]] for name in ("class", "tags")}
    for name in ("head_id", "tail_id", "neg_tail_id"):
        batch[name] = ids(random, ENTITIES, BATCH_SIZE, first=1)
    batch["relation_id"] = ids(random, RELATIONS - 1, BATCH_SIZE, first=1)
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
    refused: str = "",
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
            if name == "KTUP":  # whose rows have length 1 at first, where its penalty has an edge: rounding would decide
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

    return Case("RecBole", label or name, make, refused, quick)


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


FIRST_ORDER = "first_order_linear.token"
MASKED = {"MASK_ITEM_SEQ": "Mask_item_id_list", "POS_ITEMS": "Pos_item_id", "NEG_ITEMS": "Neg_item_id", "MASK_INDEX": "MASK_INDEX"}
TWO_NEGATIVES = {"distribution": "uniform", "sample_num": 2, "alpha": 1.0, "dynamic": False, "candidate_num": 0}
POSITIONS = ("position_embedding",)
ALL = "R"
RECBOLE = [
    recbole("AFM", made=["token"]),
    recbole("AutoInt", made=["token"]),
    recbole("DCN", made=["token"]),
    recbole("DCNV2", made=["token"]),
    recbole("DeepFM", made=["token"], quick=True),
    recbole("DSSM", made=["token"]),
    recbole("EulerNet", made=["token"]),
    recbole("FFM", made=["token"]),
    recbole("FiGNN", made=["token"]),
    recbole("FM", made=["token"]),
    recbole("FNN", made=["token"]),
    recbole("FwFM", made=["token"]),
    recbole("KD_DAGFM", made=["token"]),
    recbole("LR", made=["token"]),
    recbole("NFM", made=["token"]),
    recbole("PNN", made=["token"]),
    recbole("WideDeep", made=["token"]),
    recbole("xDeepFM", made=["token"], refused=ALL),
    recbole("xDeepFM", made=["token"], keep=["first_order_linear.token_embedding_table.embedding", "first_order_linear.token_seq_embedding_table.0"], label="xDeepFM (first-order tables kept)"),
    recbole("BPR", quick=True),
    recbole("CDAE", refused=ALL, loss_type="BCE"),
    recbole("ConvNCF", refused=ALL, embedding_size=64),
    recbole("DGCF", refused=ALL),
    recbole("ENMF", refused=ALL, made=["item"]),
    recbole("FISM", refused=ALL, made=["item"]),
    recbole("LightGCN", refused=ALL),
    recbole("LINE", refused=ALL),
    recbole("MacridVAE", refused=ALL, keep=["k_embedding"]),
    recbole("NAIS", refused=ALL, made=["item"]),
    recbole("NCL", refused=ALL),
    recbole("NeuMF", quick=True),
    recbole("NGCF", refused=ALL),
    recbole("NNCF", made=["neigh"], neigh_info_method="random"),
    recbole("SGL", refused=ALL),
    recbole("SimpleX", made=["item_emb"], train_neg_sample_args=TWO_NEGATIVES),
    recbole("SpectralCF", refused=ALL),
    recbole("BERT4Rec", keep=POSITIONS, made=["item"], **MASKED),
    recbole("Caser", refused=ALL),
    recbole("CORE", keep=["net.position_embedding"], refused=ALL, loss_type="CE"),
    recbole("DIEN", made=["token"]),
    recbole("DIN", made=["token"]),
    recbole("FDSA", keep=POSITIONS, made=["token"]),
    recbole("FEARec", keep=POSITIONS, n_layers=2, refused=ALL),
    recbole("FOSSIL"),
    recbole("FPMC"),
    recbole("GCSAN", refused=ALL),
    recbole("GRU4Rec", quick=True),
    recbole("GRU4Rec", label="GRU4Rec (loss_type=CE)", refused=ALL, loss_type="CE"),
    recbole("GRU4RecCPR", refused=ALL, loss_type="CE"),
    recbole("GRU4RecF", made=["token"]),
    recbole("GRU4RecKG", made=["entity"]),
    recbole("HGN"),
    recbole("HRM"),
    recbole("KSR", made=["entity"]),
    recbole("LightSANs", keep=POSITIONS),
    recbole("NARM"),
    recbole("NextItNet", refused=ALL),
    recbole("NPE"),
    recbole("RepeatNet", loss_type="CE"),
    recbole("S3Rec", keep=[*POSITIONS, "feature_embedding"], made=["item"], refused=ALL),
    recbole("S3Rec", label="S3Rec (finetune)", keep=POSITIONS, made=["feature"]),
    recbole("SASRec", keep=POSITIONS, quick=True),
    recbole("SASRecCPR", keep=POSITIONS, refused=ALL, loss_type="CE"),
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
    recbole("KTUP", made=["entity", "item"], use_st_gumbel=False, keep=["pref_embedding", "pref_norm_embedding", "relation_embedding", "relation_norm_embedding"]),
    recbole("MKR", made=["entity", "item"]),
    recbole("RippleNet", made=["entity", "relation"]),
]
