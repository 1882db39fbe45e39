"""Steps, look-ups and backward passes that come at the wrong time or with the wrong ids say what to do instead."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import bagpipe
from bagpipe.errors import BatchError, ConfigError, ModelError, ValueRangeError
from harness.accelerated import adagrad, start, step, train
from harness.plain import (
    assert_same_bits,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    train_fast,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


# Steps and backward passes


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


def test_gradients_of_per_sample_weights_are_refused():
    net, _, loop, _ = start()
    with loop:
        batch = next(iter(loop))
        with pytest.raises(ModelError, match=r"'item': gradients for per_sample_weights.*detach"):
            net.item(batch["item"], None, torch.ones(6, 3, requires_grad=True))


def test_batches_that_were_read_to_their_end_say_so():
    net, rows, loop, dense = start()
    for batch in loop:
        step(net, batch, dense, rows)
    with pytest.raises(ModelError, match="read to their end"):
        next(iter(loop))


# Look-ups


def test_a_wrong_mapping_is_noticed_at_the_first_look_up():
    crossed = start(make_batches(rows={"user": 20, "item": 20}), features={"item": "user", "user": "item"})
    with pytest.raises(ModelError, match=r"'user' is given id \d+, .* while 'user' has it \(is the mapping right"):
        train(*crossed)


def test_ids_of_an_earlier_batch_are_refused():
    net, rows, loop, dense = start()
    kept = []
    with loop:
        for number, batch in enumerate(loop):
            kept.append(batch)
            if number == 3:
                with pytest.raises(
                    ModelError,
                    match=r"'user' is given id \d+, .* not those of an earlier one",
                ):
                    net(kept[2])
            step(net, batch, dense, rows)


def test_raw_ids_that_are_not_here_are_refused_in_the_loop():
    net, _, loop, _ = start()
    with loop:
        next(iter(loop))
        absent = torch.tensor([[29]])
        with pytest.raises(ModelError, match=r"'user' is given id 29, which 'user' does not have .*evaluate"):
            net.user(absent)


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


def test_raw_ids_out_of_range_are_refused_after_training_too():
    net, *_ = start()
    net.eval()
    with pytest.raises(ValueRangeError, match=r"feature 'item' has id 20, out of range"):
        net.item(torch.tensor([[20]]))


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


# State


def test_a_model_in_training_can_not_be_copied_or_pickled_and_says_what_to_do():
    net, *_ = start()
    with pytest.raises(ModelError, match=r"'user' can't be copied or pickled.*export"):
        copy.deepcopy(net)
    with pytest.raises(ModelError, match="state_dict"):
        pickle.dumps(net)
    with pytest.raises(AttributeError, match=r"'user' has no weight.*state_dict"):
        net.user.weight  # noqa: B018
    assert not hasattr(net.user, "weight")


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
