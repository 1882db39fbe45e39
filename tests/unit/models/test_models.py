"""The four models against formulas written out by hand, in double precision, on tiny inputs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from bagpipe.errors import BatchError, ConfigError
from bagpipe.models import MODELS, DeepFM, build_model, count_dense, dense_parameters, unbounded_rows
from bagpipe.models.deepfm import factorization
from bagpipe.types import Ids, Table

CRITEO_KAGGLE_ROWS = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
]  # fmt: skip
CRITEO = [Table(f"C{number}", rows) for number, rows in enumerate(CRITEO_KAGGLE_ROWS)]
SMALL = {
    "dlrm": {"bottom": (5, 4), "top": (6, 3)},
    "wide_deep": {"deep": (5, 4)},
    "deep_cross": {"bottom": (5, 4), "top": (6, 3), "cross_layers": 3, "cross_rank": 2},
    "deepfm": {"deep": (5, 4)},
}
TABLES = [Table("user", 7), Table("item", 5, ("clicked", "bought")), Table("city", 3)]
FEATURES = [("user", "user"), ("item", "clicked"), ("item", "bought"), ("city", "city")]
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def small_model(name, num_dense=2, dim=3, tables=TABLES, **changes):
    return build_model(name, tables, num_dense, dim, seed=1, **{**SMALL[name], **changes}).double()


def small_batch():
    """Four samples: one id each, jagged with an empty bag, jagged and weighted, and two ids each, weighted."""
    generator = torch.Generator().manual_seed(3)
    dense = torch.rand(4, 2, generator=generator, dtype=torch.float64)
    sparse = {
        "user": Ids(torch.tensor([[6], [0], [6], [2]])),
        "clicked": Ids(torch.tensor([4, 4, 1, 0, 2]), torch.tensor([0, 2, 2, 4])),
        "bought": Ids(
            torch.tensor([1, 3, 3, 0, 4]),
            torch.tensor([0, 0, 3, 4]),
            torch.rand(5, generator=generator, dtype=torch.float64),
        ),
        "city": Ids(torch.tensor([[0, 2], [1, 1], [2, 0], [2, 2]]), None, torch.full((4, 2), 0.5).double()),
    }
    return dense, sparse


def array(tensor):
    return tensor.detach().numpy()


def pooled_by_hand(bags, sparse):
    """For each field, for each sample, the weighted sum of the rows of its bag."""
    fields = []
    for table, feature in FEATURES:
        rows, ids = array(bags[table].weight), sparse[feature]
        values, lengths = array(ids.values).reshape(-1), array(ids.lengths())
        factors = np.ones(len(values)) if ids.weights is None else array(ids.weights).reshape(-1)
        samples, position = [], 0
        for length in lengths:
            total = np.zeros(rows.shape[1])
            for place in range(position, position + length):
                total += factors[place] * rows[values[place]]
            samples.append(total)
            position += length
        fields.append(np.array(samples))
    return fields


def layers_by_hand(layers, x):
    for layer in layers:
        if isinstance(layer, nn.Linear):
            x = x @ array(layer.weight).T + array(layer.bias)
        elif isinstance(layer, nn.LayerNorm):
            centred = x - x.mean(1, keepdims=True)
            scale = np.sqrt((centred**2).mean(1, keepdims=True) + layer.eps)
            x = centred / scale * array(layer.weight) + array(layer.bias)
        else:
            assert isinstance(layer, nn.ReLU)
            x = np.where(x > 0, x, 0)
    return x


def dlrm_by_hand(model, dense, sparse):
    bottom = layers_by_hand(model.bottom, dense)
    vectors = [bottom, *pooled_by_hand(model.embeddings, sparse)]
    products = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
    return layers_by_hand(model.top, np.column_stack([bottom, *products]))[:, 0]


def wide_deep_by_hand(model, dense, sparse):
    deep = layers_by_hand(model.deep, dense)
    return layers_by_hand([model.output], np.column_stack([deep, *pooled_by_hand(model.embeddings, sparse)]))[:, 0]


def deep_cross_by_hand(model, dense, sparse):
    x0 = np.column_stack([layers_by_hand(model.bottom, dense), *pooled_by_hand(model.embeddings, sparse)])
    x = x0
    for layer in model.cross:
        matrix = array(layer.up.weight) @ array(layer.down.weight)
        x = x0 * (x @ matrix.T + array(layer.up.bias)) + x
    return layers_by_hand(model.top, x)[:, 0]


def deepfm_by_hand(model, dense, sparse):
    vectors = pooled_by_hand(model.embeddings, sparse)
    linear = sum(pooled_by_hand(model.linear, sparse))[:, 0] + array(model.bias)
    pairs = sum((left * right).sum(1) for left, right in itertools.combinations(vectors, 2))
    inputs = np.column_stack(vectors)
    if model.numeric_linear is not None:
        linear = linear + dense @ array(model.numeric_linear.weight)[0]
        inputs = np.column_stack([inputs, dense])
    return linear + pairs + layers_by_hand(model.deep, inputs)[:, 0]


BY_HAND = {
    "dlrm": dlrm_by_hand,
    "wide_deep": wide_deep_by_hand,
    "deep_cross": deep_cross_by_hand,
    "deepfm": deepfm_by_hand,
}


def assert_equals_formula(name, model):
    with torch.no_grad():
        for parameter in model.parameters():  # biases and gains too: zeros and ones would hide a wrong place
            parameter.add_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))
    dense, sparse = small_batch()
    logits = model(dense, sparse)
    assert logits.shape == (4,)
    np.testing.assert_allclose(array(logits), BY_HAND[name](model, array(dense), sparse), rtol=1e-12, atol=1e-12)


@EVERY_MODEL
def test_forward_equals_the_formula_written_by_hand(name):
    assert_equals_formula(name, small_model(name))


def test_deepfm_with_numeric_features_equals_the_formula_written_by_hand():
    assert_equals_formula("deepfm", small_model("deepfm", numeric_features=True))


def test_deepfm_leaves_numeric_features_out_unless_asked():
    dense, sparse = small_batch()
    plain, numeric = small_model("deepfm"), small_model("deepfm", numeric_features=True)
    assert torch.equal(plain(dense, sparse), plain(dense + 1, sparse))
    assert not torch.equal(numeric(dense, sparse), numeric(dense + 1, sparse))


@pytest.mark.parametrize("fields", [1, 2, 5])
def test_the_factorization_term_is_the_sum_over_pairs(fields):
    vectors = torch.randn(6, fields, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.zeros(6, dtype=torch.float64)
    for i in range(fields):
        for j in range(i):
            expected += (vectors[:, i] * vectors[:, j]).sum(1)
    torch.testing.assert_close(factorization(vectors), expected)


@pytest.mark.parametrize(
    ("name", "published"),
    [("dlrm", 2_962_289), ("wide_deep", 136_673), ("deep_cross", 2_718_609), ("deepfm", 33_851_283 - 33_762_577)],
)
def test_dense_parameters_on_criteo_are_as_many_as_published(name, published):
    assert count_dense(build_model(name, CRITEO, 13, 48, "meta")) == published


def test_the_linear_term_of_deepfm_holds_one_number_a_row():
    model = build_model("deepfm", CRITEO, 13, 48, "meta")
    assert sum(parameter.numel() for parameter in model.linear.parameters()) == 33_762_577
    assert {layer.embedding_dim for layer in model.linear.values()} == {1}


@EVERY_MODEL
def test_an_empty_batch_gives_no_logits_and_zero_gradients(name):
    model = small_model(name)
    sparse = {
        "user": Ids(torch.empty(0, 1, dtype=torch.int64)),
        "clicked": Ids(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)),
        "bought": Ids(torch.empty(0, 2, dtype=torch.int64), None, torch.empty(0, 2, dtype=torch.float64)),
        "city": Ids(torch.empty(0, 0, dtype=torch.int64)),
    }
    logits = model(torch.empty(0, 2, dtype=torch.float64), sparse)
    assert logits.shape == (0,)
    logits.sum().backward()
    for _, parameter in dense_parameters(model):
        assert parameter.grad is None or not parameter.grad.any()


@EVERY_MODEL
def test_one_sample_gives_the_logit_that_it_has_in_a_batch(name):
    model, (dense, sparse) = small_model(name), small_batch()
    together = model(dense, sparse)
    for sample in range(4):
        part = {feature: ids.part(sample, sample + 1) for feature, ids in sparse.items()}
        torch.testing.assert_close(model(dense[sample : sample + 1], part), together[sample : sample + 1])


@EVERY_MODEL
def test_ids_without_columns_pool_to_zero_like_empty_bags(name):
    model, (dense, sparse) = small_model(name), small_batch()
    none = torch.empty(0, dtype=torch.int64)
    without_columns = model(dense, sparse | {"city": Ids(torch.empty(4, 0, dtype=torch.int64))})
    empty_bags = model(dense, sparse | {"city": Ids(none, torch.zeros(4, dtype=torch.int64))})
    assert torch.equal(without_columns, empty_bags)


@EVERY_MODEL
def test_features_of_one_table_share_its_rows_and_are_fields_of_their_own(name):
    model, (dense, sparse) = small_model(name), small_batch()
    assert list(model.embeddings) == ["user", "item", "city"]
    assert model.fields == tuple(FEATURES)
    model(dense, sparse).sum().backward()
    touched = model.embeddings["item"].weight.grad.abs().sum(1) > 0
    named = set(sparse["clicked"].values.tolist()) | set(sparse["bought"].values.tolist())
    assert set(touched.nonzero().flatten().tolist()) <= named
    swapped = sparse | {"clicked": sparse["bought"], "bought": sparse["clicked"]}
    if name != "deepfm":
        assert not torch.equal(model(dense, sparse), model(dense, swapped))


@EVERY_MODEL
def test_models_work_without_numeric_features(name):
    _, sparse = small_batch()
    model = small_model(name, num_dense=0)
    logits = model(torch.empty(4, 0, dtype=torch.float64), sparse)
    assert logits.shape == (4,)
    assert len(set(logits.tolist())) == 4


@EVERY_MODEL
def test_dense_values_depend_on_the_seed_only(name):
    def dense_values(seed, device):
        model = build_model(name, TABLES, 2, 3, device, seed=seed, **SMALL[name])
        return {key: value.detach().clone() for key, value in dense_parameters(model)}

    torch.manual_seed(5)
    first = dense_values(7, None)
    torch.manual_seed(6)
    on_meta, other_seed = dense_values(7, "meta"), dense_values(8, None)
    assert first.keys() == on_meta.keys()
    assert all(value.device.type == "cpu" for value in on_meta.values())
    assert all(torch.equal(first[key], on_meta[key]) for key in first)
    assert not all(torch.equal(first[key], other_seed[key]) for key in first)


@EVERY_MODEL
def test_materialised_rows_depend_on_the_seed_only(name):
    first, again = (build_model(name, TABLES, 2, 3, seed=7).state_dict() for _ in range(2))
    other = build_model(name, TABLES, 2, 3, seed=8).state_dict()
    for key in (key for key in first if key.startswith(("embeddings.", "linear."))):
        assert torch.equal(first[key], again[key])
        assert not torch.equal(first[key], other[key])
        assert first[key].abs().max() <= 3**-0.5


@EVERY_MODEL
def test_building_leaves_the_global_generator_as_it_is(name):
    before = torch.get_rng_state()
    build_model(name, TABLES, 2, 3, **SMALL[name])
    assert torch.equal(torch.get_rng_state(), before)


@EVERY_MODEL
def test_every_parameter_is_dense_or_of_an_embedding_layer_and_gets_a_gradient(name):
    model, (dense, sparse) = small_model(name), small_batch()
    of_rows = {
        f"{kind}.{table.name}.weight"
        for kind in (["embeddings", "linear"] if isinstance(model, DeepFM) else ["embeddings"])
        for table in TABLES
    }
    assert {key for key, _ in model.named_parameters()} == of_rows | {key for key, _ in dense_parameters(model)}
    assert not of_rows & {key for key, _ in dense_parameters(model)}
    model(dense, sparse).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@EVERY_MODEL
def test_dense_parameters_stay_the_same_when_layers_are_swapped(name):
    model = small_model(name)
    before = dict(dense_parameters(model))
    for bags in (model.embeddings, getattr(model, "linear", {})):
        for table in bags:
            bags[table] = nn.Identity()
    after = dict(dense_parameters(model))
    assert before.keys() == after.keys() == dict(model.named_parameters()).keys()
    assert all(before[key] is after[key] for key in before)


def test_state_holds_parameters_only():
    model = small_model("dlrm")
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


@EVERY_MODEL
def test_tables_of_any_size_are_as_tall_as_torch_allows_on_meta(name):
    model = build_model(name, [Table("any"), Table("small", 3)], 2, 48, "meta")
    assert model.embeddings["any"].num_embeddings == unbounded_rows(48)
    if isinstance(model, DeepFM):  # both layers look up the same ids
        assert model.linear["any"].num_embeddings == unbounded_rows(48)
    with pytest.raises(RuntimeError, match="overflow"):
        nn.EmbeddingBag(unbounded_rows(48) + 1, 48, device="meta")


@EVERY_MODEL
def test_tables_of_any_size_are_refused_off_meta(name):
    with pytest.raises(ConfigError, match=r"'any'.*device='meta'"):
        build_model(name, [Table("any"), Table("small", 3)], 2)


def test_a_meta_context_allocates_no_tables():
    with torch.device("meta"):
        model = MODELS["wide_deep"](CRITEO, 13)
    assert all(layer.weight.device.type == "meta" for layer in model.embeddings.values())


@pytest.mark.parametrize("reserved", ["user.id", "type", "keys", "training"])
def test_names_that_torch_refuses_are_refused_with_a_remedy(reserved):
    with pytest.raises(ConfigError, match=r"can't name a layer.*features="):
        build_model("wide_deep", [Table(reserved, 3)], 2)
    renamed = build_model("wide_deep", [Table("renamed", 3, (reserved,))], 0, 2)
    assert renamed(torch.empty(1, 0), {reserved: Ids(torch.tensor([[1]]))}).shape == (1,)


def test_doubled_names_and_missing_tables_are_refused():
    with pytest.raises(ConfigError, match="table 'a' is named 2 times"):
        build_model("dlrm", [Table("a", 3, ("x",)), Table("a", 3, ("y",))], 2)
    with pytest.raises(ConfigError, match="feature 'x' is named 2 times"):
        build_model("dlrm", [Table("a", 3, ("x",)), Table("b", 3, ("x",))], 2)
    with pytest.raises(ConfigError, match="no tables"):
        build_model("dlrm", [], 2)
    with pytest.raises(ConfigError, match="no pairs"):
        build_model("dlrm", [Table("a", 3)], 0)
    with pytest.raises(ConfigError, match="dim is 0"):
        build_model("dlrm", TABLES, 2, 0)


def test_unknown_models_and_layers_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"'dlmr'.*dlrm, wide_deep, deep_cross, deepfm"):
        build_model("dlmr", TABLES, 2)
    with pytest.raises(ConfigError, match="'wide_deep' has no 'top': it takes deep"):
        build_model("wide_deep", TABLES, 2, top=(3,))


@EVERY_MODEL
def test_batches_of_another_shape_are_refused_by_name(name):
    model, (dense, sparse) = small_model(name), small_batch()
    with pytest.raises(BatchError, match=r"\(4, 1\).*\(samples, 2\)"):
        model(dense[:, :1], sparse)
    with pytest.raises(BatchError, match=r"no ids of feature 'bought'.*table 'item'.*'user', 'clicked', 'city'"):
        model(dense, {feature: ids for feature, ids in sparse.items() if feature != "bought"})


@EVERY_MODEL
def test_a_model_learns_which_user_clicks(name):
    tables = [Table("user", 8), Table("item", 4)]
    model = build_model(name, tables, 1, 8, seed=0)
    users = torch.arange(8).repeat(4)
    sparse = {"user": Ids(users[:, None]), "item": Ids((torch.arange(32) // 8)[:, None])}
    dense, labels = torch.zeros(32, 1), (users % 2).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(80):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < math.log(2) / 4
