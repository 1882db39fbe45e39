"""Evaluation changes nothing; state can be saved, loaded, exported; the model reads its rows when training is over."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import bagpipe
from bagpipe.errors import ModelError, ValueRangeError
from harness import sabotage, seams
from harness.explorer import explorer
from harness.flat import prepare
from harness.plain import (
    assert_close,
    assert_same_bits,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_plain,
)

pytestmark = pytest.mark.usefixtures("nothing_left")
OTHERS = make_batches(5, seed=77)
"""For evaluation; they name rows that training has not seen."""


def adagrad():
    return bagpipe.optim.Adagrad(0.1)


def train(during, batches=None, **options):
    """Train with dropout, calling `during(net, optimizer, number)` in each iteration."""
    net = make_net()
    net.top.insert(2, nn.Dropout(0.5))
    batches = make_batches(10) if batches is None else batches
    net, optimizer, loader = start(net, batches, **({"cache": 30, "check": True} | options))
    torch.manual_seed(1)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        during(net, optimizer, number)
        loss.backward()
        during(net, optimizer, number)
        optimizer.step()
        during(net, optimizer, number)
    return net, loader


def start(net, batches, rows=None, **options):
    return prepare(net, sgd(net.parameters()), batches, rows or adagrad(), **({"cache": 60} | options))


def nothing(*_):
    pass


def whole(net, optimizer, number):
    net.eval()
    with torch.no_grad():
        for batch in OTHERS:
            net(batch)
    net.train()


@torch.no_grad()
def broken_off(net, optimizer, number):
    for batch in OTHERS:
        net(batch)
        break


@torch.no_grad()
def shuffled(net, optimizer, number):
    for batch in DataLoader(torch.arange(20).reshape(10, 2), batch_size=3, shuffle=True, collate_fn=pairs):
        net(batch)
        break


def pairs(samples):
    ids = torch.stack(samples)
    return {"user": ids[:, :1], "item": ids, "dense": torch.zeros(len(ids), 2)}


def saving(net, optimizer, number):
    net.state_dict()
    optimizer.state_dict()


@pytest.mark.parametrize("during", [whole, broken_off, shuffled, saving])
@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_evaluating_in_the_middle_of_training_changes_no_bit(during, policy):
    expected, _ = train(nothing, policy=policy)

    def once(net, optimizer, number):
        if number in (0, 3, 4, 9):
            state = torch.get_rng_state()
            during(net, optimizer, number)
            if during is broken_off or during is shuffled:
                torch.set_rng_state(state)  # dropout was on in the evaluation too, which is the user's choice
            assert torch.equal(state, torch.get_rng_state())

    found, _ = train(once, policy=policy)
    assert_same_bits(expected.state_dict(), found.state_dict())


def evaluate_now_and_then(seed):
    """Whether an evaluation under a random schedule ever sees something else than plain training."""
    batches = make_batches(12, seed=seed % 5)
    plain = make_net()
    optimizer = sgd(plain.parameters())
    net, ours, loader = start(
        make_net(), batches, bagpipe.optim.SGD(0.1), cache=30, policy="lru", driver=explorer(seed, eagerness=0.5)
    )
    for number, (batch, given) in enumerate(zip(loader, batches, strict=True)):
        step(net, ours, batch)
        step(plain, optimizer, given)
        if number % 4 < 3:
            continue
        with torch.no_grad():
            for other in OTHERS:
                if not torch.allclose(net(other), plain(other), rtol=1e-4, atol=1e-5):
                    return True
    return False


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def test_an_evaluation_sees_every_update_whatever_the_schedule():
    assert not any(evaluate_now_and_then(seed) for seed in range(20))


def test_a_barrier_that_forgets_rows_on_their_way_to_the_store_is_noticed(monkeypatch):
    """Victims that leave the cache while the barrier begins; what the test above is there for."""

    sabotage.forget_victims_at_barriers(monkeypatch)
    assert any(evaluate_now_and_then(seed) for seed in range(20))


def test_evaluation_interleaved_with_training_reads_what_training_has_written():
    plain, batches = make_net(), make_batches(5)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    net = make_net()
    net, ours, loader = prepare(net, torch.optim.SGD(net.parameters(), lr=0.5), batches, cache=60)
    for batch, given, other in zip(loader, batches, OTHERS, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(net(other), plain(other))
        step(net, ours, batch)
        step(plain, optimizer, given)


def test_evaluation_before_and_after_training():
    net, optimizer, loader = start(make_net(), make_batches())

    def outputs(model):
        with torch.no_grad():
            return torch.cat([model(batch) for batch in OTHERS])

    torch.testing.assert_close(outputs(net), outputs(make_net()))
    for batch in loader:
        step(net, optimizer, batch)
    after = outputs(net)
    loader.close()
    assert torch.equal(after, outputs(net))
    plain = make_net()
    plain.load_state_dict(net.state_dict(), strict=True)
    torch.testing.assert_close(after, outputs(plain))


def test_evaluation_refuses_bad_ids():
    net, _, _ = start(make_net(), make_batches())
    with torch.no_grad(), pytest.raises(ValueRangeError, match="feature 'user' has id 30"):
        net(OTHERS[0] | {"user": torch.tensor([[30]] * 6)})


def test_state_dicts_have_plain_names_and_load_both_ways():
    trained = train_plain(make_net(), make_batches())
    net, optimizer, loader = start(make_net(), make_batches(4, seed=8), bagpipe.optim.SGD(0.1))
    net.load_state_dict(trained, strict=True)
    assert_same_bits(trained, net.state_dict())
    for batch in loader:
        step(net, optimizer, batch)
    plain = make_net()
    plain.load_state_dict(trained)
    assert_close(train_plain(plain, make_batches(4, seed=8)), net.state_dict())
    net.load_state_dict(trained)
    assert_same_bits(trained, net.state_dict())


def test_a_state_dict_with_other_names_or_shapes_is_refused_as_torch_does():
    net, _, _ = start(make_net(), make_batches())
    state = make_net().state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*user\.weight"):
        net.load_state_dict({name: value for name, value in state.items() if name != "user.weight"})
    with pytest.raises(RuntimeError, match=r"item\.weight has shape"):
        net.load_state_dict(state | {"item.weight": torch.ones(3, 3)})
    assert net.load_state_dict({}, strict=False).unexpected_keys == []


def test_a_weight_too_large_for_a_state_dict_is_refused_by_name(monkeypatch):
    net = make_net(device="meta")
    net.user = nn.EmbeddingBag(10**9, 4, mode="sum", device="meta")
    start(net, make_batches(), cache=500)
    with pytest.raises(ModelError, match=r"'user' has 16\.0 GB of weights.*bagpipe\.export"):
        net.state_dict()
    monkeypatch.setattr(*seams.STATE_BYTES_MAX, 100)
    with pytest.raises(ModelError, match=r"the optimizer has .* of state for layer 'user', too many for a state_dict"):
        train(saving)


OPTIMIZERS = {
    "adam": lambda: bagpipe.optim.Adam(lambda step: 0.1 / (1 + step)),
    "per table": lambda: bagpipe.optim.PerTable(
        bagpipe.optim.Momentum(0.1), {"user": bagpipe.optim.RowwiseAdagrad(0.1)}
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_goes_on_from_a_saved_state_with_the_same_bits(name, accumulate):
    batches = make_batches(10)

    def run(batches, saved=None, at=None):
        rows, file = OPTIMIZERS[name](), io.BytesIO()
        net, optimizer, loader = start(make_net(), batches, rows, check=True, accumulate=accumulate)
        if saved is not None:
            model_state, state = torch.load(io.BytesIO(saved), weights_only=True)
            net.load_state_dict(model_state)
            optimizer.load_state_dict(state)
        for number, batch in enumerate(loader):
            loss_of(net, batch).backward()
            if loader.step_due:
                optimizer.step()
                optimizer.zero_grad()
            if number == at:
                torch.save([net.state_dict(), optimizer.state_dict()], file)
        return net.state_dict(), optimizer.state_dict(), rows.state_dict(), file.getvalue()

    expected, of_rows, counted, saved = run(batches, at=5)
    found, rows_found, counted_again, _ = run(batches[6:], saved)
    assert_same_bits(expected, found)
    assert counted == counted_again
    assert of_rows["param_groups"] == rows_found["param_groups"]
    assert list(of_rows["state"]) == list(rows_found["state"])
    for place, state in of_rows["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(rows_found["state"][place][key])), (place, key)


def test_a_schedule_of_rows_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path):
    def run(directory, at=None, resume=None):
        checkpoint = bagpipe.Checkpointing(tmp_path / directory, every=3, resume=resume)
        net, optimizer, loader = start(make_net(), make_batches(10), OPTIMIZERS["adam"](), checkpoint=checkpoint)
        loader.register_for_checkpointing()
        for _ in range(loader.epoch, 2):
            for number, batch in enumerate(loader):
                step(net, optimizer, batch)
                if number == at:
                    return None
        return net.state_dict()

    expected = run("whole")
    run("parts", at=7)
    assert_same_bits(expected, run("parts", resume=True))


def test_statistics_count_what_moved():
    _, loader = train(nothing, policy="nocache", driver=seams.threads(30))
    stats = loader.stats()
    unique = sum(len(b["user"].unique()) + len(b["item"].unique()) for b in make_batches(10))
    assert stats["iterations"] == 10
    assert stats["fetched_rows"] == stats["written_rows"] == unique
    assert stats["hit_rate"] == 0.0
    assert stats["cache_rows"] == 30
    assert stats["cache_bytes"] == 30 * 8 * 4
