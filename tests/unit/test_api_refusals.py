"""What can't be done exactly is refused by name; what goes wrong on the way leaves rows as the reference has them."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bagpipe
from bagpipe.cluster.context import Launch
from bagpipe.config import parse_config
from bagpipe.embedding import CachedLayer
from bagpipe.errors import (
    BatchError,
    CapacityError,
    ConfigError,
    GradientError,
    ModelError,
    StoreError,
    ValueRangeError,
)
from bagpipe.trainer.stages import Threads
from bagpipe.trainer.update import RowUpdate
from bagpipe.types import Table
from twins import (
    assert_same_bits,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    one_torch_thread,  # noqa: F401
    sgd,
    train_fast,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def adagrad():
    return bagpipe.optim.Adagrad(0.1)


def step(net, batch, dense, rows):
    dense.zero_grad()
    loss_of(net, batch).backward()
    dense.step()
    rows.step()


def train(net, rows, loop, dense):
    with loop:
        for batch in loop:
            loss_of(net, batch).backward()
            if loop.step_due:
                dense.step()
                rows.step()
                dense.zero_grad()


def start(batches=None, net=None, **options):
    net, rows = net or make_net(), adagrad()
    loop = bagpipe.accelerate(net, make_batches() if batches is None else batches, rows, **({"cache": 60} | options))
    return net, rows, loop, sgd(net.parameters())


def assert_untouched(net):
    assert not any(isinstance(part, CachedLayer) for part in net.modules())


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
        ({"policy": "nocache", "lookahead": 5}, r"'nocache' keeps nothing, so lookahead \(5\) says nothing"),
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


def test_a_table_larger_than_its_layer_is_refused():
    tables = [Table("user", 31), Table("item", 20)]
    with pytest.raises(ModelError, match="table 'user' has 31 rows and layer 'user' 30"):
        bagpipe.accelerate(make_net(), make_batches(), adagrad(), tables=tables)


def test_gradients_of_per_sample_weights_are_refused():
    net, _, loop, _ = start()
    with loop:
        batch = next(iter(loop))
        with pytest.raises(ModelError, match=r"'item': gradients for per_sample_weights.*detach"):
            net.item(batch["item"], None, torch.ones(6, 3, requires_grad=True))


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


def test_a_wrong_mapping_is_noticed_at_the_first_look_up():
    crossed = start(make_batches(rows={"user": 20, "item": 20}), features={"item": "user", "user": "item"})
    with pytest.raises(ModelError, match=r"'user' was mapped to 'item' and is given ids of 'user': correct"):
        train(*crossed)


def test_a_model_without_embedding_layers_is_refused():
    with pytest.raises(ModelError, match=r"no nn.EmbeddingBag or nn.Embedding layer"):
        bagpipe.accelerate(nn.Linear(2, 2), make_batches(), adagrad())


def test_an_empty_loader_is_refused():
    net = make_net()
    with pytest.raises(BatchError, match="loader is empty"):
        bagpipe.accelerate(net, [], adagrad())
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


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_a_later_batch_too_large_for_the_cache_ends_the_data(policy):
    batches = make_batches()[:4] + make_batches(1, size=60, seed=9) + make_batches()
    net, rows, loop, dense = start(batches, cache=22, policy=policy)
    named = r"iteration 4 needs \d+ rows of tables 'user', 'item' \(rows of 8 floats\) at once.* at least \d+ rows"
    with pytest.raises(CapacityError, match=named):
        train(net, rows, loop, dense)
    assert rows.updates == 4
    assert_same_bits(train_fast(make_net(), batches[:4], adagrad()), net.state_dict())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bad", [20, -1])
def test_an_id_out_of_range_in_the_middle_is_named_and_the_rows_are_written_back(bad, accumulate):
    batches = make_batches()
    batches[5] = batches[5] | {"item": batches[5]["item"].clone()}
    batches[5]["item"][2, 1] = bad
    net, rows, loop, dense = start(batches, accumulate=accumulate)
    named = rf"batch 5: feature 'item' has id {bad}, out of range for table 'item' \(20 rows\)"
    with pytest.raises(ValueRangeError, match=named):
        train(net, rows, loop, dense)
    assert rows.updates == (5 if accumulate == 1 else 3)
    if accumulate == 1:
        assert_same_bits(train_fast(make_net(), batches[:5], adagrad()), net.state_dict())


def test_raw_ids_out_of_range_are_refused_after_training_too():
    net, *_ = start()
    net.eval()
    with pytest.raises(ValueRangeError, match=r"feature 'item' has id 20, out of range"):
        net.item(torch.tensor([[20]]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_before_the_update(value):
    net, rows, loop, dense = start()
    with loop:
        for number, batch in enumerate(loop):
            dense.zero_grad()
            loss = loss_of(net, batch)
            if number == 3:
                (loss * value).backward()
                with pytest.raises(
                    GradientError, match=r"iteration 3: the gradient of row \d+ of table '\w+' is not finite"
                ):
                    rows.step()
                break
            loss.backward()
            dense.step()
            rows.step()
    assert rows.updates == 3
    assert_same_bits(train_fast(make_net(), make_batches()[:3], adagrad()), net.state_dict())


@pytest.mark.parametrize("policy", ["nocache", "lookahead"])
def test_a_full_disk_surfaces_as_a_store_error_without_a_hang(monkeypatch, policy):
    """Where every row leaves at once, in the loop; where they stay to the end, when it ends."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    net, rows, loop, dense = start(store="mapped", driver=Threads(20), policy=policy, cache=60, depth=1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="No space left") as caught:
        train(net, rows, loop, dense)
    assert caught.value.errno == errno.ENOSPC
    assert rows.updates < 8 or policy == "lookahead"


def test_a_step_is_due_once_and_only_inside_the_loop():
    net, rows, loop, dense = start()
    with pytest.raises(ModelError, match=r"step\(\) outside of the training loop"):
        rows.step()
    with loop:
        for number, batch in enumerate(loop):
            assert rows.step() is False, "there is no gradient yet"
            step(net, batch, dense, rows)
            if number == 1:
                with pytest.raises(ModelError, match=r"step\(\) twice in iteration 1"):
                    rows.step()
    with pytest.raises(ModelError, match="no rows to update"):
        rows.step()
    with pytest.raises(ModelError, match="drives no rows"):
        bagpipe.clip_grad_norm_(net.parameters(), rows, 1.0)
    assert_same_bits(train_fast(make_net(), make_batches(), adagrad()), net.state_dict())


def test_a_step_before_the_last_batch_of_an_iteration_is_refused():
    net, rows, loop, _ = start(accumulate=3)
    with loop:
        for number, batch in enumerate(loop):
            loss_of(net, batch).backward()
            if number == 1:
                with pytest.raises(ModelError, match=r"1 batches of this iteration still to come.*step_due"):
                    rows.step()
            if loop.step_due:
                rows.step()


def test_ids_of_an_earlier_batch_are_refused():
    net, rows, loop, dense = start()
    kept = []
    with loop:
        for number, batch in enumerate(loop):
            kept.append(batch)
            if number == 3:
                with pytest.raises(ModelError, match="ids of an earlier batch"):
                    net(kept[2])
            step(net, batch, dense, rows)


def test_a_backward_pass_of_an_earlier_iteration_is_refused():
    net, _, loop, _ = start()
    with loop:
        iterator = iter(loop)
        loss = loss_of(net, next(iterator))
        next(iterator)
        with pytest.raises(ModelError, match="iteration that is over"):
            loss.backward()


def test_a_backward_pass_after_the_update_is_refused():
    net, rows, loop, _ = start()
    with loop:
        loss = loss_of(net, next(iter(loop)))
        loss.backward(retain_graph=True)
        rows.step()
        with pytest.raises(ModelError, match=r"backward\(\) before rows\.step\(\)"):
            loss.backward()


def test_a_backward_pass_after_clipping_is_refused():
    net, rows, loop, _ = start()
    with loop:
        loss = loss_of(net, next(iter(loop)))
        loss.backward(retain_graph=True)
        bagpipe.clip_grad_norm_(net.parameters(), rows, 0.01)
        loss.backward()
        with pytest.raises(ModelError, match="after the row gradients were clipped"):
            rows.step()
        loop.zero_grad()


def test_raw_ids_that_are_not_here_are_refused_in_the_loop():
    net, _, loop, _ = start()
    with loop:
        next(iter(loop))
        absent = torch.tensor([[29]])
        with pytest.raises(ModelError, match=r"'user' is given id 29, which is not a row of this batch.*evaluate"):
            net.user(absent)


def test_ids_can_not_be_changed_in_place():
    _, _, loop, _ = start()
    with loop, pytest.raises(ModelError, match="changed in place"):
        next(iter(loop))["item"][0, 0] = 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((torch.tensor([0]),), "1 dimensions"),
        ((torch.tensor([[0]]), torch.tensor([0])), "2 dimensions"),
        ((torch.tensor([[0]]), None, torch.ones(1, 2)), "per_sample_weights"),
        ((torch.tensor([[0]]), None, torch.ones(1, 1, dtype=torch.float64)), "float64"),
        ((torch.tensor([0, 1]), torch.tensor([1])), "offsets"),
        ((torch.tensor([0, 1]), torch.tensor([0, 5])), "offsets"),
    ],
)
def test_calls_that_a_plain_layer_would_not_take_are_refused(arguments, named):
    net, *_ = start()
    with pytest.raises(BatchError, match=named):
        net.item(*arguments)


def test_include_last_offset_must_end_at_the_last_id():
    net = make_net(include_last_offset=True)
    batches = [{"user": b["user"], "item": (b["item"].flatten(), torch.arange(0, 19, 3))} for b in make_batches()]
    start(batches, net=net)
    with pytest.raises(BatchError, match=r"'item' has include_last_offset=True and is given 3 ids.*end at 2"):
        net.item(torch.tensor([0, 1, 2]), torch.tensor([0, 2]))


def test_a_batch_that_lacks_a_feature_ends_the_data():
    batches = make_batches()
    del batches[3]["user"]
    net, rows, loop, dense = start(batches)
    with pytest.raises(BatchError, match="batch 3 has no ids of feature 'user'"):
        train(net, rows, loop, dense)
    assert rows.updates == 3


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


def test_one_row_optimizer_drives_one_model():
    rows = adagrad()
    net, other = make_net(), make_net()
    with bagpipe.accelerate(net, make_batches(), rows):
        with pytest.raises(ModelError, match="already drives"):
            bagpipe.accelerate(other, make_batches(), rows)
        assert_untouched(other)


def test_a_model_in_training_can_not_be_copied_or_pickled_and_says_what_to_do():
    net, *_ = start()
    with pytest.raises(ModelError, match=r"'user' can't be copied or pickled.*export"):
        copy.deepcopy(net)
    with pytest.raises(ModelError, match="state_dict"):
        pickle.dumps(net)
    with pytest.raises(AttributeError, match=r"'user' has no weight.*state_dict"):
        net.user.weight  # noqa: B018
    assert not hasattr(net.user, "weight")


def test_batches_that_were_read_to_their_end_say_so():
    net, rows, loop, dense = start()
    for batch in loop:
        step(net, batch, dense, rows)
    with pytest.raises(ModelError, match="read to their end"):
        next(iter(loop))


INTERRUPTED = """
    import os, signal, sys, threading, time
    sys.path.insert(0, {tests!r})
    import torch
    torch.set_num_threads(1)
    import bagpipe
    from twins import loss_of, make_batches, make_net, sgd, threads_left

    batches = make_batches(400, seed=1)
    net, rows = make_net(), bagpipe.optim.Adagrad(0.1)
    loop = bagpipe.accelerate(net, batches, rows, cache=60, store="mapped")
    dense = sgd(net.parameters())
    done = 0
    def interrupt():
        while done < 20:
            time.sleep(0.0005)
        time.sleep({delay})
        os.kill(os.getpid(), signal.{signal})
    if {signal!r} == "SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    threading.Thread(target=interrupt).start()
    try:
        with loop:
            for batch in loop:
                dense.zero_grad()
                loss_of(net, batch).backward()
                rows.step()
                done = rows.updates
    except (KeyboardInterrupt, SystemExit) as error:
        print(type(error).__name__)
    assert threads_left() == [], threads_left()
    torch.save((rows.updates, net.state_dict()), sys.argv[1])
"""


@pytest.mark.parametrize(
    ("name", "error", "delay"), [("SIGINT", "KeyboardInterrupt", 0.0037), ("SIGTERM", "SystemExit", 0.0)]
)
def test_a_real_signal_ends_the_loop_between_two_updates(tmp_path, name, error, delay):
    """Dense parameters are left alone here, as only the row update is made whole by bagpipe."""
    script = textwrap.dedent(INTERRUPTED.format(tests=str(Path(__file__).parents[1]), delay=delay, signal=name))
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "state.pt")], capture_output=True, text=True, timeout=120
    )
    assert result.stdout.strip() == error, result.stderr
    updates, found = torch.load(tmp_path / "state.pt")
    assert 20 <= updates < 400
    rows, net = adagrad(), make_net()
    with bagpipe.accelerate(net, make_batches(400, seed=1)[:updates], rows, cache=60) as loop:
        for batch in loop:
            loss_of(net, batch).backward()
            rows.step()
            net.zero_grad()
    assert_same_bits(net.state_dict(), found)


def test_a_signal_during_an_update_waits_until_it_is_done(monkeypatch):
    expected = train_fast(make_net(), make_batches()[:4], adagrad())
    net, rows, loop, dense = start(check=True)
    applied = RowUpdate.apply

    def apply(*arguments):
        if rows.updates == 3:
            signal.raise_signal(signal.SIGINT)
        applied(*arguments)

    monkeypatch.setattr(RowUpdate, "apply", apply)
    with pytest.raises(KeyboardInterrupt):
        train(net, rows, loop, dense)
    assert rows.updates == 4
    assert_same_bits(expected, net.state_dict())


def test_saved_rows_of_another_model_are_refused():
    _, _, loop, _ = start()
    state = loop.state_dict()
    cases = {
        "tables": {"user": state["tables"]["user"]},
        "floats": state["tables"] | {"user": {"ids": torch.tensor([1]), "rows": torch.ones(1, 3)}},
        "twice": state["tables"] | {"user": {"ids": torch.tensor([1, 1]), "rows": torch.ones(2, 8)}},
    }
    for named, tables in cases.items():
        with pytest.raises(ModelError, match=named):
            loop.load_state_dict(state | {"tables": tables})
    outside = state["tables"] | {"user": {"ids": torch.tensor([30]), "rows": torch.ones(1, 8)}}
    with pytest.raises(ValueRangeError, match="30"):
        loop.load_state_dict(state | {"tables": outside})
    with pytest.raises(ConfigError, match="sgd"):
        loop.load_state_dict(state | {"optimizer": bagpipe.optim.SGD(0.1).state_dict()})
    assert loop.store.num_rows(0) == 0
    with loop:
        next(iter(loop))
        with pytest.raises(ModelError, match="while training goes on"):
            loop.load_state_dict(state)
        with pytest.raises(ModelError, match="while training goes on"):
            loop.model.load_state_dict(make_net().state_dict())


def test_rows_of_a_table_are_not_created_by_looking_at_them():
    net, _, loop, _ = start()
    before = np.array([loop.store.num_rows(0), loop.store.num_rows(1)])
    with torch.no_grad():
        net(make_batches()[0])
        for batch in loop.evaluate(make_batches()):
            net(batch)
    assert (before == [loop.store.num_rows(0), loop.store.num_rows(1)]).all()


def test_ids_with_their_offsets_in_one_record_are_named_with_their_parts():
    net, _, loop, _ = start()
    with loop:
        next(iter(loop))
        with pytest.raises(ModelError, match=r"is given a Ids, not a tensor.*ids\.values, ids\.offsets"):
            net.user(bagpipe.Ids(torch.tensor([[1]])))


def test_layers_in_a_plain_list_are_told_where_to_go():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.EmbeddingBag(5, 2)]

    with pytest.raises(ModelError, match=r"nn\.ModuleList"):
        bagpipe.accelerate(Hidden(), [{"a": torch.tensor([[1]])}], bagpipe.optim.SGD(0.1))
