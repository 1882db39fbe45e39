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
from harness.flat import prepare
from harness.plain import (
    assert_same_bits,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_fast,
)
from harness.started import adagrad, assert_untouched, start, train

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
        start(net=net)
    assert_untouched(net)


def test_tied_weights_are_refused():
    net = make_net()
    net.other = nn.EmbeddingBag(20, 4)
    net.other.weight = net.item.weight
    with pytest.raises(ModelError, match=r"(?=.*item)(?=.*other).*share one weight"):
        start(net=net)


def test_a_weight_that_another_module_uses_is_refused():
    net = make_net()
    net.out = nn.Linear(4, 20, bias=False)
    net.out.weight = net.item.weight
    with pytest.raises(ModelError, match=r"'item' and 'out.weight' share one weight"):
        start(net=net)


def test_a_table_larger_than_its_layer_is_refused():
    tables = [Table("user", 31), Table("item", 20)]
    with pytest.raises(ModelError, match="table 'user' has 31 rows and layer 'user' 30"):
        start(features=tables)


def test_an_optimizer_may_have_the_dense_part_alone():
    net = make_net()
    train(*prepare(net, sgd(net.top.parameters()), make_batches(), adagrad(), cache=60))
    assert_same_bits(train_fast(make_net(), make_batches(), adagrad()), net.state_dict())


def test_a_model_without_embedding_layers_is_refused():
    with pytest.raises(ModelError, match=r"no nn.EmbeddingBag or nn.Embedding layer"):
        start(net=nn.Linear(2, 2))


@pytest.mark.parametrize("trained", [False, True])
def test_row_optimizers_are_for_one_model(trained):
    """They count its updates."""
    rows = adagrad()
    first = start(rows=rows)
    if trained:
        train(*first)
    for again in (rows, bagpipe.optim.PerTable(adagrad(), {"item": rows})):
        other = make_net()
        with pytest.raises(ConfigError, match=r"this Adagrad was given to bagpipe\.prepare already.*for each model"):
            start(net=other, rows=again)
        assert_untouched(other)


def test_layers_in_a_plain_list_are_told_where_to_go():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.top = [nn.EmbeddingBag(5, 2)], nn.Linear(2, 1)

    with pytest.raises(ModelError, match=r"nn\.ModuleList"):
        start([{"a": torch.tensor([[1]])}], Hidden())


# Settings


def test_row_optimizers_of_unknown_tables_are_refused():
    rows = bagpipe.optim.PerTable(adagrad(), {"usr": bagpipe.optim.SGD(0.1)})
    with pytest.raises(ConfigError, match=r"'usr'.*'user', 'item'"):
        start(rows=rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": ["lru"]}, r"policy is \['lru'\]: give one of lookahead"),
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
        start(Read(make_batches()), net, **options)
    assert not read
    assert_untouched(net)


def test_nocache_may_be_told_that_it_reads_no_batch_ahead():
    start(policy="nocache", lookahead=1)[2].close()


def test_a_policy_that_reads_old_rows_is_refused_with_several_trainers():
    launch = Launch(parse_config({}), (), b"", None, trainers=3)
    net, stale = make_net(), {"policy": "windowed", "policy_options": {"mode": "stale"}}
    with launch.entered(), pytest.raises(ConfigError, match="mode 'stale' is for one trainer, not 3: use 'strict'"):
        start(net=net, **stale)
    assert_untouched(net)


@pytest.mark.parametrize(
    "options",
    [
        {"lookahead": 0},
        {"lookahead": -3},
        {"lookahead": "far"},
        {"lookahead": True},
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
        start(net=net, rows=rows, **options)
    assert name in str(caught.value)
    assert str(value) in str(caught.value)
    assert_untouched(net)
    start(net=net, rows=rows)  # nothing of it stands in the way


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"options": {"device": "cpu"}}, r"options is \{'device': 'cpu'\}: give a bagpipe\.Options"),
        ({"checkpoint": "runs/1"}, r"checkpoint is 'runs/1': give a bagpipe\.Checkpointing"),
        ({"store": 3}, r"store is 3: give 'memory', a directory, a bagpipe\.Files"),
        ({"store": None}, "store is None"),
        ({"features": ["user", "item"]}, r"features is \['user', 'item'\]: give a mapping.*bagpipe\.Table"),
        ({"cache": bagpipe.Cache(60, options=3)}, "options of the policy are 3: give a mapping"),
    ],
)
def test_what_is_of_another_kind_is_refused_with_what_to_give(options, named):
    net = make_net()
    with pytest.raises(ConfigError, match=named):
        bagpipe.prepare(net, sgd(net.parameters()), make_batches(), **options)
    assert_untouched(net)


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
        start([], net)
    assert_untouched(net)


def test_a_batch_without_ids_is_refused_with_what_it_has():
    batches = [{"x": torch.ones(2, 3), "user": np.array([1, 2])}]
    net = make_net()
    with pytest.raises(
        BatchError, match=r"no ids.*a dict in which 'x' is a tensor of float32.*'user' is a NumPy array"
    ):
        start(batches, net)
    assert_untouched(net)


def test_ids_that_are_not_integers_are_refused_with_their_type():
    batches = [batch | {"item": batch["item"].float()} for batch in make_batches()]
    for features in (None, {"user": "user", "item": "item"}):
        with pytest.raises(BatchError, match=r"'item'.* is a tensor of float32 and shape \(6, 3\): ids are integers"):
            start(batches, features=features)


def test_a_pair_that_is_not_bags_is_refused_when_nobody_has_named_it():
    batches = [batch | {"item": (torch.tensor([4, 5]), torch.tensor([3, 0]))} for batch in make_batches()]
    with pytest.raises(BatchError, match=r"batch 0: 'item' is a pair.*offsets of bags.*'item\.0'"):
        start(batches)
