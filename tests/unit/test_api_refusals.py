"""What can't be done exactly is refused by name before training begins, and the model is left as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import bagpipe
from bagpipe.cluster.context import Launch
from bagpipe.config import parse_config
from bagpipe.errors import BatchError, CapacityError, ConfigError, ModelError
from bagpipe.types import Table
from harness.accelerated import adagrad, assert_untouched, start, step
from harness.plain import (
    assert_same_bits,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_fast,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


# Models and optimizers


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_norm": 1.0}, "max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"mode": "max"}, "mode='max'"),
    ],
)
def test_layers_that_can_not_be_exact_are_refused_by_name(options, named):
    net = make_net(**options)
    with pytest.raises(ModelError, match=f"'item'.*{named}"):
        bagpipe.accelerate(net, make_batches(), adagrad())
    assert_untouched(net)


def test_tied_weights_are_refused():
    net = make_net()
    net.other = nn.EmbeddingBag(20, 4)
    net.other.weight = net.item.weight
    with pytest.raises(ModelError, match=r"(?=.*item)(?=.*other).*share one weight"):
        bagpipe.accelerate(net, make_batches(), adagrad())


def test_a_weight_that_another_module_uses_is_refused():
    net = make_net()
    net.out = nn.Linear(4, 20, bias=False)
    net.out.weight = net.item.weight
    with pytest.raises(ModelError, match=r"'item' and 'out.weight' share one weight"):
        bagpipe.accelerate(net, make_batches(), adagrad())


def test_a_table_larger_than_its_layer_is_refused():
    tables = [Table("user", 31), Table("item", 20)]
    with pytest.raises(ModelError, match="table 'user' has 31 rows and layer 'user' 30"):
        bagpipe.accelerate(make_net(), make_batches(), adagrad(), tables=tables)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_dense_optimizer_that_holds_a_table_is_refused(kind):
    net = make_net()
    optimizer = kind(net.parameters(), lr=0.1)
    with pytest.raises(
        ModelError, match=rf"a {kind.__name__} holds the weight of layer 'user'.*after bagpipe.accelerate"
    ):
        bagpipe.accelerate(net, make_batches(), adagrad())
    assert_untouched(net)
    del optimizer


def test_an_optimizer_of_the_dense_part_alone_may_exist_before():
    net = make_net()
    dense, rows = sgd(net.top.parameters()), adagrad()
    with bagpipe.accelerate(net, make_batches(), rows) as loop:
        for batch in loop:
            step(net, batch, dense, rows)
    assert_same_bits(train_fast(make_net(), make_batches(), adagrad()), net.state_dict())


def test_a_model_without_embedding_layers_is_refused():
    with pytest.raises(ModelError, match=r"no nn.EmbeddingBag or nn.Embedding layer"):
        bagpipe.accelerate(nn.Linear(2, 2), make_batches(), adagrad())


def test_one_row_optimizer_drives_one_model():
    rows = adagrad()
    net, other = make_net(), make_net()
    with bagpipe.accelerate(net, make_batches(), rows):
        with pytest.raises(ModelError, match="already drives"):
            bagpipe.accelerate(other, make_batches(), rows)
        assert_untouched(other)


def test_layers_in_a_plain_list_are_told_where_to_go():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.EmbeddingBag(5, 2)]

    with pytest.raises(ModelError, match=r"nn\.ModuleList"):
        bagpipe.accelerate(Hidden(), [{"a": torch.tensor([[1]])}], bagpipe.optim.SGD(0.1))


# Settings


def test_optimizers_of_unknown_tables_and_iterators_for_several_epochs_are_refused():
    rows = bagpipe.optim.PerTable(adagrad(), {"usr": bagpipe.optim.SGD(0.1)})
    with pytest.raises(ConfigError, match=r"'usr'.*'user', 'item'"):
        bagpipe.accelerate(make_net(), make_batches(), rows)
    with pytest.raises(ConfigError, match=r"epochs is 2.*can be read once"):
        bagpipe.accelerate(make_net(), iter(make_batches()), adagrad(), epochs=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": ["lru"]}, r"no policy \['lru'\]: choose one of lookahead"),
        ({"policy": "fifo"}, "no policy 'fifo'"),
        ({"policy": "nocache", "lookahead": 5}, r"'nocache' keeps nothing, so lookahead \(5\) has no effect"),
    ],
)
def test_policies_that_can_not_be_are_refused_before_a_batch_is_read(options, message):
    net, read = make_net(), []

    class Read(list):
        def __iter__(self):
            read.append(True)
            return super().__iter__()

    with pytest.raises(ConfigError, match=message):
        bagpipe.accelerate(net, Read(make_batches()), adagrad(), **options)
    assert not read
    assert_untouched(net)


def test_nocache_may_be_told_that_it_reads_no_batch_ahead():
    start(policy="nocache", lookahead=1)[2].close()


def test_a_policy_that_reads_old_rows_is_refused_with_several_trainers(monkeypatch):
    launch = Launch(parse_config({}), (), b"", None, trainers=3)
    monkeypatch.setattr("bagpipe.api.current", lambda: launch)
    net, stale = make_net(), {"policy": "windowed", "policy_options": {"mode": "stale"}}
    with pytest.raises(ConfigError, match="mode 'stale' is for one trainer, not 3: use 'strict'"):
        bagpipe.accelerate(net, make_batches(), adagrad(), **stale)
    assert_untouched(net)


@pytest.mark.parametrize(
    "options",
    [
        {"lookahead": 0},
        {"lookahead": -3},
        {"lookahead": "far"},
        {"lookahead": True},
        {"epochs": 0},
        {"accumulate": 0},
        {"depth": 0},
        {"threads": 0},
        {"cache": 0},
        {"cache": "much"},
        {"policy": "magic"},
        {"store": "somewhere"},
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(options):
    net, rows = make_net(), adagrad()
    (name, value), *_ = options.items()
    with pytest.raises(ConfigError) as caught:
        bagpipe.accelerate(net, make_batches(), rows, **options)
    assert name in str(caught.value)
    assert str(value) in str(caught.value)
    assert_untouched(net)
    bagpipe.accelerate(net, make_batches(), rows)  # the optimizer is still free


@pytest.mark.parametrize("dims", [(4, 4), (4, 9)])
@pytest.mark.parametrize("unit", ["rows", "bytes"])
def test_a_cache_smaller_than_the_first_batch_says_which_size_is_enough(dims, unit):
    def run(cache):
        train_fast(make_net(dims=dims), [make_batches()[0]] * 3, adagrad(), cache=cache)

    with pytest.raises(CapacityError, match=r"give at least cache=") as caught:
        run(3 if unit == "rows" else "100B")
    enough = str(caught.value).split("cache=")[1].split(",")[0].strip("'")
    run(int(enough) if unit == "rows" else enough)
    if unit == "rows":
        with pytest.raises(CapacityError):
            run(int(enough) - 1)


# Batches


def test_an_empty_loader_is_refused():
    net = make_net()
    with pytest.raises(BatchError, match="loader is empty"):
        bagpipe.accelerate(net, [], adagrad())
    assert_untouched(net)


def test_a_batch_without_ids_is_refused_with_what_it_has():
    batches = [{"x": torch.ones(2, 3), "user": np.array([1, 2])}]
    net = make_net()
    with pytest.raises(
        BatchError, match=r"no ids.*a dict in which 'x' is a tensor of float32.*'user' is a NumPy array"
    ):
        bagpipe.accelerate(net, batches, adagrad())
    assert_untouched(net)


def test_ids_that_are_not_integers_are_refused_with_their_type():
    batches = [batch | {"item": batch["item"].float()} for batch in make_batches()]
    for features in (None, {"user": "user", "item": "item"}):
        with pytest.raises(BatchError, match=r"'item'.* is a tensor of float32 and shape \(6, 3\): ids are integers"):
            bagpipe.accelerate(make_net(), batches, adagrad(), features=features)


def test_a_pair_that_is_not_bags_is_refused_when_nobody_has_named_it():
    batches = [batch | {"item": (torch.tensor([4, 5]), torch.tensor([3, 0]))} for batch in make_batches()]
    with pytest.raises(BatchError, match=r"batch 0: 'item' is a pair.*offsets of bags.*'item\.0'"):
        bagpipe.accelerate(make_net(), batches, adagrad())
