import pytest
import torch
from torch import nn

from bagpipe.errors import ModelError
from bagpipe.layers import Replacement, bind, embedding_layers, swap
from bagpipe.types import Table


class Two(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.user_embedding = nn.EmbeddingBag(10, 4, **options)
        self.item_emb = nn.Embedding(20, 3)


def names_by_layer(binding):
    return {layer.name: binding.tables[layer.table].features for layer in binding.layers}


def test_layers_are_found_by_the_names_of_their_features():
    binding = bind(Two(), ["user_id", "item", "label"])
    assert names_by_layer(binding) == {"user_embedding": ("user_id",), "item_emb": ("item",)}
    assert [table.rows for table in binding.tables] == [10, 20]
    assert binding.dims(0) == (4,)


def test_a_single_layer_takes_a_single_feature_whatever_they_are_called():
    binding = bind(nn.Sequential(nn.EmbeddingBag(5, 2)), ["anything"])
    assert names_by_layer(binding) == {"0": ("anything",)}


def test_a_given_mapping_wins_over_names():
    binding = bind(Two(), ["a", "b"], {"a": "item_emb", "b": "user_embedding"})
    assert names_by_layer(binding) == {"user_embedding": ("b",), "item_emb": ("a",)}


def test_several_features_on_one_layer_share_its_table():
    binding = bind(
        Two(), ["clicked", "bought", "user"], {"clicked": "item_emb", "bought": "item_emb", "user": "user_embedding"}
    )
    assert names_by_layer(binding)["item_emb"] == ("clicked", "bought")


def test_layers_with_the_same_features_share_a_row():
    model = nn.ModuleDict(
        {
            "factors": nn.ModuleDict({"ad": nn.EmbeddingBag(7, 5)}),
            "linear": nn.ModuleDict({"ad": nn.EmbeddingBag(7, 1)}),
        }
    )
    binding = bind(model, ["ad"], tables=[Table("ad", 7)])
    assert binding.tables == (Table("ad", 7),)
    assert binding.dims(0) == (5, 1)
    assert [layer.part for layer in binding.layers] == [0, 1]


def test_tables_of_the_data_name_the_tables_and_their_size():
    model = nn.ModuleDict({"ad": nn.EmbeddingBag(7, 5, device="meta")})
    binding = bind(model, ["shown", "clicked"], tables=[Table("ad", None, ("shown", "clicked"))])
    assert binding.tables == (Table("ad", None, ("shown", "clicked")),)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_norm": 1.0}, "max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"mode": "max"}, "max"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(options, named):
    with pytest.raises(ModelError, match=named) as caught:
        bind(Two(**options), ["user", "item"])
    assert "user_embedding" in str(caught.value)


def test_two_layers_with_one_weight_are_refused():
    model = Two()
    model.other = nn.Embedding(20, 3)
    model.other.weight = model.item_emb.weight
    with pytest.raises(ModelError, match=r"(?=.*item_emb)(?=.*other)"):
        bind(model, ["user", "item", "other"])


@pytest.mark.parametrize(
    ("mapping", "named"),
    [
        ({"nobody": "item_emb", "user": "user_embedding"}, "nobody"),
        ({"item": "absent", "user": "user_embedding"}, "absent"),
        ({"user": "user_embedding"}, "item_emb"),
        ({"user": ["user_embedding", "item_emb"], "item": "item_emb"}, "share all.*'user' twice"),
        ({"user": ["user_embedding", "item_emb"]}, "rows"),
    ],
)
def test_a_wrong_mapping_is_refused_at_once(mapping, named):
    with pytest.raises(ModelError, match=named):
        bind(Two(), ["user", "item"], mapping)


def test_a_layer_without_a_feature_is_refused_unless_kept():
    with pytest.raises(ModelError, match="item_emb"):
        bind(Two(), ["user", "something"])
    assert names_by_layer(bind(Two(), ["user", "something"], keep=["item_emb"])) == {"user_embedding": ("user",)}


def test_a_model_without_embedding_layers_is_refused():
    with pytest.raises(ModelError, match=r"no nn\.EmbeddingBag"):
        bind(nn.Linear(2, 2), ["user"])


def test_swap_replaces_attributes_and_entries_of_containers():
    model = nn.ModuleDict({"bags": nn.ModuleList([nn.EmbeddingBag(3, 2)]), "two": Two()})
    for name in embedding_layers(model):
        swap(model, name, nn.Identity())
    assert embedding_layers(model) == {}
    assert isinstance(model["two"].item_emb, nn.Identity)


def test_a_replaced_layer_is_found_again_but_is_no_part_of_the_model():
    model = Two()
    layer = model.item_emb
    swap(model, "item_emb", Replacement(layer))
    assert embedding_layers(model)["item_emb"] is layer
    assert [name for name, _ in model.named_parameters()] == ["user_embedding.weight"]


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 10


def tie_to_a_linear(model):
    model.out = nn.Linear(3, 20, bias=False)
    model.out.weight = model.item_emb.weight


def give_it_a_forward_of_its_own(model):
    model.item_emb = Scaled(20, 3)


def hook_the_layer(model):
    model.item_emb.register_forward_hook(lambda *_: None)


def hook_the_weight(model):
    model.item_emb.weight.register_hook(lambda grad: grad * 0)


def parametrize_it(model):
    nn.utils.parametrizations.weight_norm(model.item_emb)


@pytest.mark.parametrize(
    "change", [tie_to_a_linear, give_it_a_forward_of_its_own, hook_the_layer, hook_the_weight, parametrize_it]
)
def test_what_a_swap_would_silently_lose_is_refused_by_name_unless_kept(change):
    model = Two()
    change(model)
    with pytest.raises(ModelError, match="item_emb"):
        bind(model, ["user", "item"])
    assert [layer.name for layer in bind(model, ["user", "item"], keep=["item_emb"]).layers] == ["user_embedding"]


def test_names_to_keep_must_be_layers_in_a_list():
    with pytest.raises(ModelError, match="give a list"):
        bind(Two(), ["user", "item"], keep="item_emb")
    with pytest.raises(ModelError, match="nope"):
        bind(Two(), ["user", "item"], keep=["nope"])
