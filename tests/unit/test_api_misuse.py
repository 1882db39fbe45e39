"""Steps, look-ups and backward passes that come at the wrong time or with the wrong ids say what to do instead."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import bagpipe
from bagpipe.errors import BatchError, ModelError, ValueRangeError
from harness.plain import (
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
)
from harness.started import start, step, train

pytestmark = pytest.mark.usefixtures("nothing_left")


# Steps and backward passes


def test_clipping_is_for_the_batch_in_training():
    net, optimizer, loader = start()
    for _ in range(2):
        with pytest.raises(ModelError, match=r"clip_grad_norm_ outside of the training loop.*after loss\.backward"):
            bagpipe.clip_grad_norm_(net.parameters(), loader, 1.0)
        train(net, optimizer, loader)


def test_a_backward_pass_of_an_earlier_iteration_is_refused():
    net, _, loader = start()
    with loader:
        iterator = iter(loader)
        loss = loss_of(net, next(iterator))
        next(iterator)
        with pytest.raises(ModelError, match=r"iteration that is over.*before optimizer\.step"):
            loss.backward()


def test_a_backward_pass_after_the_update_is_refused():
    """Also where torch has nothing against it, as no weight of another layer was changed meanwhile."""
    net, optimizer, loader = start()
    for batch in loader:
        loss = net.user(batch["user"]).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(ModelError, match=r"backward\(\) before optimizer\.step\(\)"):
            loss.backward()
        break


def test_a_backward_pass_after_clipping_is_refused():
    net, optimizer, loader = start()
    for batch in loader:
        loss = loss_of(net, batch)
        loss.backward(retain_graph=True)
        bagpipe.clip_grad_norm_(net.parameters(), loader, 0.01)
        loss.backward()
        with pytest.raises(ModelError, match="after the row gradients were clipped"):
            optimizer.step()
        break


def test_gradients_of_per_sample_weights_are_refused():
    net, _, loader = start()
    for batch in loader:
        with pytest.raises(ModelError, match=r"'item': gradients for per_sample_weights.*detach"):
            net.item(batch["item"], None, torch.ones(6, 3, requires_grad=True))


# Look-ups


def test_a_wrong_mapping_is_noticed_at_the_first_look_up():
    crossed = start(make_batches(rows={"user": 20, "item": 20}), features={"item": "user", "user": "item"})
    with pytest.raises(ModelError, match=r"'user' is given id \d+, .* while 'user' has it \(is the mapping right"):
        train(*crossed)


def test_ids_of_an_earlier_batch_are_refused():
    net, optimizer, loader = start()
    kept = []
    for number, batch in enumerate(loader):
        kept.append(batch)
        if number == 3:
            with pytest.raises(ModelError, match=r"'user' is given id \d+, .* not those of an earlier one"):
                net(kept[2])
        step(net, batch, optimizer)


def test_raw_ids_that_are_not_here_are_refused_in_the_loop():
    net, _, loader = start()
    absent = torch.tensor([[29]])
    for _ in loader:
        with pytest.raises(ModelError, match=r"'user' is given id 29, which 'user' does not have .*evaluate"):
            net.user(absent)
        break


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
    net, optimizer, loader = start()

    def num_rows():
        return [loader.loop.store.num_rows(table) for table in (0, 1)]

    def look():
        before = num_rows()
        with torch.no_grad():
            for batch in (
                *make_batches(seed=3),
                {"user": torch.arange(30)[:, None], "item": torch.arange(20)[:, None]},
            ):
                net.user(batch["user"]), net.item(batch["item"])
        return num_rows() == before

    assert look()
    for number, batch in enumerate(loader):
        step(net, batch, optimizer)
        if number == 2:
            loader.flush()
            assert look()
    assert look()


def test_ids_with_their_offsets_in_one_record_are_named_with_their_parts():
    net, _, loader = start()
    for _ in loader:
        with pytest.raises(ModelError, match=r"is given a Ids, not a tensor.*ids\.values, ids\.offsets"):
            net.user(bagpipe.Ids(torch.tensor([[1]])))


# State


def test_a_model_that_was_prepared_can_not_be_copied_or_pickled_and_says_what_to_do():
    net, *_ = start()
    with pytest.raises(ModelError, match=r"'user' can't be copied or pickled.*export"):
        copy.deepcopy(net)
    with pytest.raises(ModelError, match="state_dict"):
        pickle.dumps(net)
