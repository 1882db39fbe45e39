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
from ecosystem.training import BATCH_SIZE, NUM_BATCHES, Trial

LENGTH = 6
TOKENS = {"user_id": 120, "age": 12, "gender": 3, "item_id": 160, "class": 20}
ENTITIES, RELATIONS = 220, 9
SMALL = {
    "embedding_size": 8, "hidden_size": 8, "inner_size": 16, "mlp_hidden_size": [16, 8], "n_layers": 1, "n_heads": 2,
    "MAX_ITEM_LIST_LENGTH": LENGTH, "use_gpu": False, "train_batch_size": BATCH_SIZE, "loss_type": "BPR",
    "kg_embedding_size": 8,
}  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """What RecBole changes for the whole process it changes for a while: NumPy's names, YAML's numbers, its own log."""
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
    ):
        yield


def config_of(name: str, **settings: Any) -> Any:
    from recbole.config import Config

    with quiet():
        return Config(name, "none", config_dict={"train_neg_sample_args": None, **SMALL, **settings})


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
    data.field2seqlen = dict.fromkeys(data.field2type, 1) | {"tags": 3}
    sizes = {**TOKENS, "tags": 30, "entity_id": ENTITIES, "head_id": ENTITIES, "tail_id": ENTITIES, "relation_id": RELATIONS}
    data.field2id_token = {name: [f"{name}{n}" for n in range(size)] for name, size in sizes.items()}
    data.field2id_token["relation_id"][-1] = "[UI-Relation]"
    with quiet():
        n = 600
        data.inter_feat = Interaction({
            "user_id": ids(random, TOKENS["user_id"], n, first=1), "item_id": ids(random, TOKENS["item_id"], n, first=1),
            "rating": torch.from_numpy(random.integers(1, 6, n).astype(np.float32)), "timestamp": torch.arange(n).float(),
        })
        data.user_feat = Interaction({"user_id": torch.arange(TOKENS["user_id"]), "age": ids(random, 12, TOKENS["user_id"]), "gender": ids(random, 3, TOKENS["user_id"])})
        m = TOKENS["item_id"]
        data.item_feat = Interaction({"item_id": torch.arange(m), "class": ids(random, 20, m), "tags": ids(random, 30, m, 3)})
        data.kg_feat = Interaction({"head_id": ids(random, ENTITIES, n, first=1), "relation_id": ids(random, RELATIONS - 1, n, first=1), "tail_id": ids(random, ENTITIES, n, first=1)})
    data._preloaded_weight = {"ent_id": random.random((ENTITIES, 8)), "rel_id": random.random((RELATIONS, 8))}
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
    "item": ("item_id", "neg_item_id", "item_id_list"),
    "entity": ("head_id", "tail_id", "neg_tail_id", "item_id", "neg_item_id"),
    "relation": ("relation_id",),
}
"""Which fields feed a layer, by a word in its name."""


def loss_of(model: Any, batch: Any) -> Tensor:
    """All of a model's losses."""
    names = ("calculate_loss", "calculate_rs_loss", "calculate_kg_loss")
    found = [getattr(model, name)(batch) for name in names if name in vars(type(model))]
    parts = [part for each in found for part in (each if isinstance(each, tuple) else (each,))]
    return sum((part.sum() for part in parts), torch.zeros(()))


def recbole(
    kind: str,
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
        from recbole.utils import get_model

        config = config_of(name, **settings)
        data = data_of(config)

        def build() -> nn.Module:
            with quiet():
                return get_model(name)(config, data)

        model = build()
        layers = [layer for layer in embeddings(model) if layer not in keep]
        made_by_model = [layer for layer in layers if any(part in layer for part in made)]
        features: dict[str, list[str]] = {}
        for layer in layers:
            word = next((word for word in NAMED if word in layer), "item")
            for feature in [f"rows of {layer}"] if layer in made_by_model else NAMED[word]:
                features.setdefault(feature.replace(".", "_"), []).append(layer)
        batches = []
        for fields in each_batch(lambda random: batch_of(data, random)):
            looked_up = recorded(model, Interaction(fields), made_by_model)
            batches.append(Interaction(fields | {f"rows of {layer}".replace(".", "_"): found for layer, found in looked_up.items()}))
        return Trial(build, batches, loss_of, lambda model, batch: model.predict(batch), features, keep)

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
        with torch.no_grad():
            loss_of(model, batch)
            model.predict(batch)
    for hook in hooks:
        hook.remove()
    return {layer: torch.cat(several) for layer, several in found.items()}


CONTEXT = ("AFM", "AutoInt", "DCN", "DCNV2", "DeepFM", "DSSM", "EulerNet", "FFM", "FiGNN", "FM", "FNN", "FwFM", "KD_DAGFM", "LR", "NFM", "PNN", "WideDeep", "xDeepFM")
GENERAL = ("BPR","CDAE","ConvNCF","DGCF","ENMF","FISM","LightGCN","LINE","MacridVAE","NAIS","NCL","NeuMF","NGCF","NNCF","SGL","SimpleX","SpectralCF")
SEQUENTIAL = ("BERT4Rec","Caser","CORE","DIEN","DIN","FDSA","FEARec","FOSSIL","FPMC","GCSAN","GRU4Rec","GRU4RecCPR","GRU4RecF","GRU4RecKG","HGN","HRM","KSR","LightSANs","NARM","NextItNet","NPE","RepeatNet","S3Rec","SASRec","SASRecCPR","SASRecF","SHAN","SINE","SRGNN","STAMP","TransRec")
KNOWLEDGE = ("CFKG","CKE","KGCN","KGIN","KGNNLS","KTUP","MCCLK","MKR","RippleNet")
RECBOLE = [
    *[recbole("context_aware", name, made=["token"]) for name in CONTEXT],
    *[recbole("general", name) for name in GENERAL],
    *[recbole("sequential", name, keep=["position_embedding"]) for name in SEQUENTIAL],
    *[recbole("knowledge_aware", name) for name in KNOWLEDGE],
]
